"""Each check against made-up machines: what it says of a sound one, and of each way to be unsound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blink_deploy.doctor import gpu, pci, rdma
from blink_deploy.doctor.checks import CHECKS, examine, is_fit
from blink_deploy.doctor.clock import Clock
from blink_deploy.doctor.cuda import Gpu, Gpus
from blink_deploy.doctor.nvml import Board
from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, Result
from blink_deploy.doctor.site import Part, Site, Transport, guess_part
from tests.deploy.doctor.machines import (
    GPU,
    HOPPER,
    NETWORK,
    config_space,
    gpu_host,
    healthy,
    link,
    on_bus,
    rdma_device,
    site,
    told,
    unknown,
    write,
)

OK, WARN, FAIL, SKIPPED = Result.OK, Result.WARN, Result.FAIL, Result.SKIPPED
NO_CONTROL_PLANE = {"certificates", "control-plane", "arena"}


def sound(root: Path, **changes: Any) -> Probe:
    return healthy(gpu_host(root), **changes)


def gpus_with(**attributes: int) -> Any:
    return lambda: Gpus((13, 0), [Gpu("H200", GPU, HOPPER | attributes)])


def boards_with(**changes: Any) -> Any:
    facts = {"name": "H200", "bar1": 256 << 30, "persistent": True, "clock": 1980, "most": 1980, "slowed": 0}
    return lambda: [Board(**facts | changes)]


def test_nothing_is_wrong_with_a_sound_machine(tmp_path: Path) -> None:
    findings = examine(sound(tmp_path), site())
    bad = {name: each for name, each in findings.items() if each.result is not OK and name not in NO_CONTROL_PLANE}
    assert list(bad) == ["open-files"], bad  # which a GPU's host does not need
    assert findings.keys() == {check.name for check in CHECKS if Part.GPU in check.parts}


def test_every_result_but_ok_says_what_to_do(tmp_path: Path) -> None:
    empty = healthy(tmp_path, gpus=unknown("no driver"), boards=unknown("no NVML"), doca=unknown("no DOCA"),
                    verbs=unknown("no verbs"), clock=lambda: Clock(False, 16.0), limit=lambda what: 1024,
                    space=lambda name: (0, 0))  # fmt: skip
    for part in Part:
        for transport in Transport:
            findings = examine(empty, site(part, transport))
            for name, found in findings.items():
                assert found.seen, name
                assert bool(found.todo) is (found.result in (WARN, FAIL)), (name, found)
            assert not is_fit(findings, strict=False)


def test_warnings_count_when_told_so() -> None:
    findings = {"a": Finding(OK, ""), "b": Finding(SKIPPED, ""), "c": Finding(WARN, "", "do")}
    assert is_fit(findings, strict=False)
    assert not is_fit(findings, strict=True)


@pytest.mark.parametrize(
    ("changes", "result", "words"),
    [
        ({"gpus": unknown("no CUDA driver")}, FAIL, "no CUDA driver"),
        ({"gpus": lambda: Gpus((13, 0))}, FAIL, "no device"),
        ({"gpus": lambda: Gpus((12, 8), [Gpu("H200", GPU, HOPPER)])}, FAIL, "CUDA 12.8"),
        ({"gpus": gpus_with(capability_major=8, capability_minor=9)}, FAIL, "compute 8.9"),
        ({"gpus": gpus_with(capability_major=10)}, OK, "compute 10.0"),
    ],
)
def test_driver(tmp_path: Path, changes: dict[str, Any], result: Result, words: str) -> None:
    found = gpu.driver(sound(tmp_path, **changes), site())
    assert found.result is result
    assert words in found.seen


def test_the_soft_gpu_needs_no_driver(tmp_path: Path) -> None:
    found = gpu.driver(sound(tmp_path, gpus=unknown("no CUDA driver")), site(Part.SINGLE, Transport.SHM))
    assert found.result is SKIPPED
    assert "soft GPU" in found.seen


@pytest.mark.parametrize(
    ("check", "changes", "result", "words"),
    [
        (gpu.direct_rdma, {"gpus": gpus_with(direct_rdma=0)}, FAIL, "GPUDirect RDMA no"),
        (gpu.dma_buf, {"gpus": gpus_with(dma_buf=0)}, FAIL, "dma-buf no"),
        (gpu.write_order, {"gpus": gpus_with(write_ordering=0)}, FAIL, "0 (none)"),
        (gpu.write_order, {"gpus": gpus_with(write_ordering=200)}, OK, "200 (all devices)"),
        (gpu.bar1, {"boards": boards_with(bar1=(256 << 20) - 1)}, FAIL, "BAR1 255 MiB"),
        (gpu.bar1, {"boards": boards_with(bar1=256 << 20)}, OK, "BAR1 256 MiB"),
        (gpu.bar1, {"boards": list}, SKIPPED, "no board"),
        (gpu.persistence, {"boards": boards_with(persistent=False)}, WARN, "off"),
        (gpu.clocks, {"boards": boards_with(clock=1200, slowed=0x40 | 0x80)}, WARN, "hardware heat, power brake"),
        (gpu.clocks, {"boards": boards_with(clock=345, slowed=0x1)}, OK, "345 of 1,980 MHz"),  # idle
    ],
)  # fmt: skip
def test_device(tmp_path: Path, check: Any, changes: dict[str, Any], result: Result, words: str) -> None:
    found = check(sound(tmp_path, **changes), site())
    assert found.result is result
    assert words in found.seen


def test_the_worst_of_several_devices_counts(tmp_path: Path) -> None:
    both = [Gpu("sound", GPU, HOPPER), Gpu("unsound", "0000:29:00.0", HOPPER | {"write_ordering": 0})]
    found = gpu.write_order(sound(tmp_path, gpus=lambda: Gpus((13, 0), both)), site())
    assert found.result is FAIL
    assert "sound: " in found.seen
    assert "unsound: " in found.seen


def test_modules_of_the_driver(tmp_path: Path) -> None:
    assert gpu.open_modules(sound(tmp_path), site()).result is OK
    write(tmp_path, {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n"})
    assert gpu.open_modules(healthy(tmp_path), site()).result is FAIL


@pytest.mark.parametrize(
    ("dma_buf", "loaded", "transport", "of_dma_buf", "of_peermem", "words"),
    [
        (1, False, Transport.VERBS, OK, OK, "not needed"),
        (1, True, Transport.VERBS, OK, OK, "not used unless"),
        (1, True, Transport.DOCA, OK, OK, "not used unless"),
        (0, False, Transport.VERBS, FAIL, FAIL, "nor is there dma-buf"),
        (0, True, Transport.VERBS, WARN, OK, "serves where there is no dma-buf"),
        (0, True, Transport.DOCA, FAIL, FAIL, "which the doca transport cannot use"),
    ],
)  # fmt: skip
def test_the_ways_to_memory(
    tmp_path: Path, dma_buf: int, loaded: bool, transport: Transport, of_dma_buf: Result, of_peermem: Result, words: str
) -> None:
    where = site(Part.GPU, transport)
    if loaded:
        write(tmp_path, {"/sys/module/nvidia_peermem/refcnt": "0"})
    write(tmp_path, {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n"})
    probe = healthy(tmp_path, gpus=gpus_with(dma_buf=dma_buf))
    assert gpu.dma_buf(probe, where).result is of_dma_buf
    found = gpu.peermem(probe, where)
    assert found.result is of_peermem
    assert words in found.seen
    assert gpu.open_modules(probe, where).result is (WARN if loaded and transport is Transport.VERBS else FAIL)


@pytest.mark.parametrize(
    ("state", "device", "result", "words"),
    [
        ("4: ACTIVE", "", OK, "mlx5_0/1 ACTIVE, Ethernet, 400 Gb/sec"),
        ("1: DOWN", "", FAIL, "mlx5_0/1 DOWN"),
        ("4: ACTIVE", "mlx5_7", FAIL, "no device mlx5_7; there are mlx5_0"),
    ],
)
def test_rdma_devices(tmp_path: Path, state: str, device: str, result: Result, words: str) -> None:
    found = rdma.devices(healthy(rdma_device(tmp_path, state=state)), site(device=device))
    assert found.result is result
    assert words in found.seen


def test_one_active_port_will_do(tmp_path: Path) -> None:
    rdma_device(rdma_device(tmp_path, "mlx5_1", state="1: DOWN"))
    assert rdma.devices(healthy(tmp_path), site()).result is OK
    assert rdma.devices(healthy(tmp_path), site(device="mlx5_1")).result is FAIL


@pytest.mark.parametrize(
    ("kind", "address", "result", "words"),
    [
        ("RoCE v2", "192.168.200.1", OK, "mlx5_0 index 3"),
        ("IB/RoCE v1", "192.168.200.1", FAIL, "RoCE v1 only"),
        ("RoCE v2", "192.168.200.9", FAIL, "there are 192.168.200.1"),
        ("RoCE v2", "", SKIPPED, "--rdma-address"),
    ],
)
def test_rdma_address(tmp_path: Path, kind: str, address: str, result: Result, words: str) -> None:
    found = rdma.address(healthy(rdma_device(tmp_path, kind=kind)), site(address=address))
    assert found.result is result
    assert words in found.seen


def test_mtu(tmp_path: Path) -> None:
    assert rdma.mtu(healthy(rdma_device(tmp_path)), site()) == Finding(OK, "ens1f0np0 9000")
    assert rdma.mtu(healthy(rdma_device(tmp_path, mtu=1500)), site()).result is WARN
    assert rdma.mtu(healthy(tmp_path), site(address="10.9.8.7")).result is SKIPPED


@pytest.mark.parametrize(
    ("address", "interfaces", "result", "words"),
    [
        ("192.168.200.1", {"link0": ["192.168.200.1"]}, OK, "no default route"),
        ("192.168.200.1", {"ens2": ["192.168.200.1"]}, WARN, "the way to all other networks"),
        ("192.168.200.1", {"link0": ["10.0.0.1"]}, WARN, "no interface here"),
        ("8.8.8.8", {"link0": ["8.8.8.8"]}, FAIL, "public address"),
        ("fd00:2::1", {"link0": ["fd00:2::1"]}, OK, "fd00:2::1"),
        ("", {}, SKIPPED, "--rdma-address"),
    ],
)
def test_private_link(tmp_path: Path, address: str, interfaces: dict[str, Any], result: Result, words: str) -> None:
    found = rdma.private_link(sound(tmp_path, addresses=lambda: interfaces), site(address=address))
    assert found.result is result
    assert words in found.seen


def test_files_of_devices(tmp_path: Path) -> None:
    assert rdma.files(healthy(tmp_path), site()).result is FAIL
    assert rdma.files(healthy(rdma_device(tmp_path)), site()) == Finding(OK, "uverbs0")


def test_one_binding_that_sees_a_device_will_do(tmp_path: Path) -> None:
    def look(ibverbs: list[str] | None, pyverbs: list[str] | None) -> Finding:
        def verbs(binding: str) -> list[str]:
            found = {"ibverbs": ibverbs, "pyverbs": pyverbs}[binding]
            return unknown("is not installed")() if found is None else found

        return rdma.verbs(healthy(tmp_path, verbs=verbs), site())

    assert look(["mlx5_0"], None) == Finding(OK, "ibverbs sees mlx5_0; no pyverbs: is not installed")
    assert look([], ["mlx5_1"]).result is OK
    assert look([], None).result is FAIL
    assert "rdma-devices" in look([], []).todo
    assert "pip install" in look(None, None).todo


@pytest.mark.parametrize(
    ("check", "own", "fact"), [(rdma.verbs, Transport.VERBS, "verbs"), (rdma.doca, Transport.DOCA, "doca")]
)
def test_a_transports_library_is_missed_where_it_is_used(tmp_path: Path, check: Any, own: Transport, fact: str) -> None:
    absent = healthy(tmp_path, **{fact: unknown("is not installed")})
    for transport in Transport:
        found = check(absent, site(Part.DPU, transport))
        assert found.result is (FAIL if transport is own else SKIPPED)
        assert "is not installed" in found.seen
        assert check(healthy(tmp_path), site(Part.DPU, transport)).result is OK


@pytest.mark.parametrize(
    ("changes", "result", "words"),
    [
        ({}, OK, "per_mkey"),
        ({"run": told("PCI_WR_ORDERING  force_relax(1)")}, FAIL, "force_relax"),
        ({"run": unknown("mlxconfig is not installed")}, SKIPPED, "mlxconfig is not installed"),
        ({"environment": {"MLX5_RELAXED_PACKET_ORDERING_ON": "1"}}, FAIL, "MLX5_RELAXED_PACKET_ORDERING_ON is set"),
        ({"environment": {"MLX5_RELAXED_PACKET_ORDERING_ON": "0"}}, OK, "per_mkey"),
    ],
)
def test_ordering(tmp_path: Path, changes: dict[str, Any], result: Result, words: str) -> None:
    found = rdma.ordering(sound(tmp_path, **changes), site())
    assert found.result is result
    assert words in found.seen


def test_ordering_asks_for_the_device_by_its_place(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def run(command: Any) -> str:
        asked.append(list(command))
        return "per_mkey(0)"

    rdma.ordering(sound(tmp_path, run=run), site())
    assert asked == [["mlxconfig", "-d", NETWORK, "-e", "query", "PCI_WR_ORDERING"]]


def test_bus_path(tmp_path: Path) -> None:
    found = pci.path(sound(tmp_path), site())
    assert found == Finding(OK, f"{GPU} and {NETWORK} meet below 0000:16:00.0; ACS redirects nothing")


@pytest.mark.parametrize(
    ("control", "words"), [(0x04, "request redirect"), (0x1D, "request redirect, completion redirect")]
)
@pytest.mark.parametrize("bridge", ["0000:17:00.0", "0000:17:01.0"])
def test_acs_between_the_two(tmp_path: Path, bridge: str, control: int, words: str) -> None:
    probe = sound(tmp_path)
    write(tmp_path, {f"/sys/bus/pci/devices/{bridge}/config": config_space(control)})
    found = pci.path(probe, site())
    assert found.result is WARN
    assert f"{bridge} ({words})" in found.seen


def test_acs_where_the_two_have_met_does_not_matter(tmp_path: Path) -> None:
    probe = sound(tmp_path)
    for bridge in ("0000:15:01.0", "0000:16:00.0"):
        write(tmp_path, {f"/sys/bus/pci/devices/{bridge}/config": config_space(0x1D)})
    assert pci.path(probe, site()).result is OK


def test_acs_that_is_not_there_or_hidden(tmp_path: Path) -> None:
    probe = sound(tmp_path)
    write(tmp_path, {"/sys/bus/pci/devices/0000:17:00.0/config": config_space(None)})
    assert "redirects nothing" in pci.path(probe, site()).seen
    write(tmp_path, {"/sys/bus/pci/devices/0000:17:00.0/config": config_space(0x1D, size=64)})
    assert "ACS of 0000:17:00.0 is not to be read" in pci.path(probe, site()).seen
    # A list of capabilities that goes round in circles ends.
    space = bytearray(config_space(None))
    space[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    write(tmp_path, {"/sys/bus/pci/devices/0000:17:00.0/config": bytes(space)})
    assert pci.path(probe, site()).result is OK


def test_devices_of_different_root_ports(tmp_path: Path) -> None:
    rdma_device(tmp_path)
    on_bus(tmp_path, GPU, "0000:15:01.0")
    on_bus(tmp_path, NETWORK, "0000:15:02.0")
    link(tmp_path, "/sys/class/infiniband/mlx5_0/device", f"/sys/devices/pci0000:15/0000:15:02.0/{NETWORK}")
    found = pci.path(healthy(tmp_path), site())
    assert found.result is WARN
    assert "share no root port" in found.seen


def test_iommu(tmp_path: Path) -> None:
    probe = sound(tmp_path)
    assert pci.iommu(probe, site()) == Finding(OK, "no IOMMU is on")
    write(tmp_path, {"/sys/class/iommu/dmar0/uevent": ""})
    assert pci.iommu(probe, site()).result is SKIPPED
    for name in (GPU, NETWORK):
        write(tmp_path, {f"/sys/bus/pci/devices/{name}/iommu_group/type": "identity\n"})
    assert pci.iommu(probe, site()).result is OK
    write(tmp_path, {f"/sys/bus/pci/devices/{GPU}/iommu_group/type": "DMA-FQ\n"})
    found = pci.iommu(probe, site())
    assert found.result is FAIL
    assert f"{GPU} DMA-FQ" in found.seen


def test_the_part_is_guessed(tmp_path: Path) -> None:
    assert guess_part(healthy(tmp_path)) is Part.SINGLE
    assert guess_part(sound(tmp_path / "host")) is Part.GPU
    arm = write(tmp_path / "arm", {"/sys/class/dmi/id/product_name": "BlueField-3 DPU\n"})
    assert guess_part(healthy(arm, machine="aarch64")) is Part.DPU
    assert guess_part(healthy(arm)) is Part.SINGLE
    assert guess_part(healthy(tmp_path, machine="aarch64")) is Part.SINGLE


def test_parts_look_at_what_is_theirs(tmp_path: Path) -> None:
    names = {part: set(examine(healthy(tmp_path), Site(part, Transport.SHM))) for part in Part}
    assert not any(name.startswith("gpu-") for name in names[Part.DPU])
    assert not any(name.startswith("rdma-") for name in names[Part.SINGLE])
    assert set.union(*names.values()) == {check.name for check in CHECKS}
    assert not any(name.startswith("https-") for name in names[Part.GPU])
    assert all(names[part] >= NO_CONTROL_PLANE | {"clock", "kernel", "shared-memory"} for part in Part)
