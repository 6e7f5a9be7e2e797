"""Clock, processors, kernel."""

from __future__ import annotations

import re

from blink_deploy.doctor.gpu import peermem_serves
from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, fail, ok, skip, warn
from blink_deploy.doctor.site import Part, Site, Transport, is_bluefield

DMA_BUF_KERNEL = (5, 12)
PEERMEM_KERNEL = (5, 0)
"""From here on a process can register memory through a device's file that another one opened."""
USUAL_PAGE = 4096
_CRYPTOGRAPHY = {"x86_64": ("aes",), "aarch64": ("aes", "sha2")}


def clock(probe: Probe, site: Site) -> Finding:
    """Certificates are valid from and until a time."""
    found = probe.clock()
    if found.synchronised:
        return ok(f"synchronised, within {found.error * 1000:.1f} ms")
    return warn("not synchronised", "timedatectl set-ntp true, or chrony; else certificates seem not yet valid")


def processors(probe: Probe, site: Site) -> Finding:
    """Kind and number, and whether they help with TLS."""
    text = probe.files.text("/proc/cpuinfo") or ""
    count = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    flags = set(_value(text, "flags", "Features").split())
    if not count or not flags:
        return skip("/proc/cpuinfo is not to be read")
    name = _value(text, "model name") or _arm_part(text)
    seen = f"{count} × {name} ({probe.machine}){', BlueField' if is_bluefield(probe) else ''}"
    missing = [flag for flag in _CRYPTOGRAPHY.get(probe.machine, ()) if flag not in flags]
    if missing and site.part is not Part.GPU:
        return warn(
            f"{seen}, without {' and '.join(missing)}", "TLS costs several times as much; is cryptography disabled?"
        )
    if site.part is Part.DPU and probe.machine != "aarch64":
        return warn(seen, "a DPU's cores are Arm; the image blink-dpu is for arm64")
    return ok(seen)


def page_size(probe: Probe, site: Site) -> Finding:
    """Registered memory begins and ends on pages."""
    seen = f"{probe.page_bytes:,} bytes"
    if probe.page_bytes == USUAL_PAGE:
        return ok(seen)
    todo = "a channel of the arena begins every 4,096 bytes, so RDMA cannot register it alone: 4 KiB pages"
    return ok(seen) if site.transport is Transport.SHM else fail(seen, todo)


def kernel(probe: Probe, site: Site) -> Finding:
    """New enough for dma-buf where a GPU's memory is registered."""
    release = probe.files.text("/proc/sys/kernel/osrelease") or ""
    found = re.match(r"(\d+)\.(\d+)", release)
    if not found:
        return skip("/proc/sys/kernel/osrelease is not to be read")
    version = int(found[1]), int(found[2])
    if site.part is Part.GPU and version < DMA_BUF_KERNEL:
        todo = "dma-buf for RDMA came with Linux 5.12"
        serves = version >= PEERMEM_KERNEL and peermem_serves(probe, site)
        return warn(f"{release}, nvidia-peermem serves instead", todo) if serves else fail(release, todo)
    return ok(release)


def modules(probe: Probe, site: Site) -> Finding:
    """Kernel modules of RDMA, and of the GPU."""
    if site.transport is Transport.SHM:
        return skip("shared memory needs none")
    drivers = [name for name in ("mlx5_ib", "rdma_rxe", "irdma", "bnxt_re") if _is_loaded(probe, name)]
    missing = [name for name in ("ib_core", "ib_uverbs") if not _is_loaded(probe, name)]
    if missing or not drivers:
        absent = [*missing, *([] if drivers else ["mlx5_ib"])]
        return fail(f"not loaded: {', '.join(absent)}", f"modprobe {' '.join(absent)}")
    if drivers == ["rdma_rxe"]:
        return warn("rdma_rxe alone: RDMA in software", "for trials only; a ConnectX or BlueField has mlx5_ib")
    return ok(f"ib_core, ib_uverbs, {', '.join(drivers)}")


def _is_loaded(probe: Probe, name: str) -> bool:
    return probe.files.exists(f"/sys/module/{name}")


def _value(text: str, *names: str) -> str:
    found = re.search(rf"^(?:{'|'.join(names)})\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def _arm_part(text: str) -> str:
    """Arm's cores have no names there, but numbers."""
    part = _value(text, "CPU part")
    return {"0xd42": "Cortex-A78AE", "0xd41": "Cortex-A78", "0xd4f": "Neoverse V2", "0xd08": "Cortex-A72"}.get(
        part, f"part {part}" if part else "unknown processor"
    )
