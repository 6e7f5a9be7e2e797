"""Made-up machines: trees as the kernel shows them, and what libraries would tell."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blink_deploy.doctor.clock import Clock
from blink_deploy.doctor.cuda import Gpu, Gpus
from blink_deploy.doctor.errors import UnknownError
from blink_deploy.doctor.nvml import Board
from blink_deploy.doctor.probe import Files, Probe
from blink_deploy.doctor.site import Part, Site, Transport

ADDRESS = "192.168.200.1"
GID = "0000:0000:0000:0000:0000:ffff:c0a8:c801"
"""Of that address."""
GPU = "0000:19:00.0"
NETWORK = "0000:1a:00.0"
HOPPER = {"capability_major": 9, "capability_minor": 0, "direct_rdma": 1, "write_ordering": 100, "dma_buf": 1}


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    """Files by their absolute names."""
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def link(root: Path, name: str, target: str) -> None:
    """A link by absolute names."""
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
    path.symlink_to(root / target.lstrip("/"))


def rdma_device(
    root: Path, name: str = "mlx5_0", state: str = "4: ACTIVE", kind: str = "RoCE v2", mtu: int = 9000
) -> Path:
    """A device with the private link's address as the fourth entry of its table."""
    port = f"/sys/class/infiniband/{name}/ports/1"
    files: dict[str, str | bytes] = {
        f"{port}/state": f"{state}\n",
        f"{port}/link_layer": "Ethernet\n",
        f"{port}/rate": "400 Gb/sec (4X NDR)\n",
        f"{port}/gids/0": "fe80:0000:0000:0000:0a3f:72ff:fe00:0001\n",
        f"{port}/gid_attrs/types/0": "RoCE v2\n",
        f"{port}/gid_attrs/ndevs/0": "ens1f0np0\n",
        f"{port}/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000\n",
        f"{port}/gids/3": f"{GID}\n",
        f"{port}/gid_attrs/types/3": f"{kind}\n",
        f"{port}/gid_attrs/ndevs/3": "ens1f0np0\n",
        "/sys/class/net/ens1f0np0/mtu": f"{mtu}\n",
        "/dev/infiniband/uverbs0": "",
        "/sys/module/ib_core/refcnt": "1",
        "/sys/module/ib_uverbs/refcnt": "1",
        "/sys/module/mlx5_ib/refcnt": "1",
    }
    return write(root, files)


def on_bus(root: Path, device: str, *way: str) -> None:
    """A device behind bridges, from the root port on."""
    link(root, f"/sys/bus/pci/devices/{device}", "/".join(["/sys/devices/pci0000:15", *way, device]))
    for at, bridge in enumerate(way):
        if not (root / "sys/bus/pci/devices" / bridge).exists():
            link(root, f"/sys/bus/pci/devices/{bridge}", "/".join(["/sys/devices/pci0000:15", *way[: at + 1]]))


def config_space(acs_control: int | None, size: int = 4096) -> bytes:
    """As `/sys/bus/pci/devices/…/config`: a first extended capability of another kind, and ACS as the second."""
    space = bytearray(size)
    if size > 0x100:
        following = 0x148 if acs_control is not None else 0
        space[0x100:0x104] = (0x0001 | 2 << 16 | following << 20).to_bytes(4, "little")
        if acs_control is not None:
            space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
            space[0x14E:0x150] = acs_control.to_bytes(2, "little")
    return bytes(space)


def gpu_host(root: Path) -> Path:
    """A host with a GPU and an RDMA device below one switch."""
    rdma_device(root)
    write(
        root,
        {
            "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\n",
            "/proc/cpuinfo": "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu aes avx\n\nprocessor\t: 1\n",
            "/proc/meminfo": "MemTotal: 1048576 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB\n",
            "/proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
            "/proc/net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
            "ens2\t00000000\t0100A8C0\t3\t0\t0\t0\t00000000\n",
        },
    )
    on_bus(root, GPU, "0000:15:01.0", "0000:16:00.0", "0000:17:00.0")
    on_bus(root, NETWORK, "0000:15:01.0", "0000:16:00.0", "0000:17:01.0")
    link(
        root,
        "/sys/class/infiniband/mlx5_0/device",
        "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/" + NETWORK,
    )
    for bridge in ("0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:17:01.0"):
        write(root, {f"/sys/bus/pci/devices/{bridge}/config": config_space(0x01)})
    return root


def told(text: str) -> Any:
    """A tool that prints this whatever it is asked."""

    def run(command: Sequence[str]) -> str:
        return text

    return run


def unknown(reason: str) -> Any:
    """Something that cannot be told."""

    def refuse(*arguments: object) -> Any:
        raise UnknownError(reason)

    return refuse


def healthy(root: Path, **changes: Any) -> Probe:
    """Everything that libraries tell is as it should be."""
    facts: dict[str, Any] = {
        "files": Files(root),
        "environment": {},
        "machine": "x86_64",
        "page_bytes": 4096,
        "run": told("PCI_WR_ORDERING  per_mkey(0)"),
        "limit": lambda what: None if what == resource.RLIMIT_MEMLOCK else 1048576,
        "space": lambda name: (1 << 30, 1 << 29),
        "addresses": lambda: {"lo": ["127.0.0.1"], "ens1f0np0": [ADDRESS]},
        "clock": lambda: Clock(True, 0.0005),
        "gpus": lambda: Gpus((13, 0), [Gpu("H200", GPU, HOPPER)]),
        "boards": lambda: [Board("H200", 256 << 30, True, 1980, 1980, 0)],
        "doca": lambda folder: "3.3.0109",
        "verbs": lambda binding: ["mlx5_0"],
    }
    return Probe(**facts | changes)


def site(part: Part = Part.GPU, transport: Transport = Transport.VERBS, **more: Any) -> Site:
    """A machine with the link's address."""
    return Site(part, transport, **{"address": ADDRESS, **more})
