"""Limits of the process and of the machine's memory."""

from __future__ import annotations

import re
import resource

from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, fail, ok, skip, warn
from blink_deploy.doctor.site import Part, Site, Transport

LOCKED_BYTES = 256 << 20
"""Arena and landing memory of 64 channels, with room."""
OPEN_FILES = 16384
"""Twice the connections that a front end takes by default."""
SHARED_BYTES = 80 << 20
"""Arena of 64 channels: 1.2 MiB each."""
_MIB = 1 << 20


def locked_memory(probe: Probe, site: Site) -> Finding:
    """Memory that RDMA may pin."""
    bound = probe.limit(resource.RLIMIT_MEMLOCK)
    if site.transport is Transport.SHM:
        return skip(f"{_bytes(bound)}; shared memory pins nothing")
    if bound is None or bound >= LOCKED_BYTES:
        return ok(_bytes(bound))
    if _may_lock(probe):
        return ok(f"{_bytes(bound)}, which does not bind this process: it has the capability IPC_LOCK")
    todo = (
        "LimitMEMLOCK=infinity for containerd or the unit; ulimit -l unlimited: else registering memory fails (ENOMEM)"
    )
    return fail(_bytes(bound), todo)


def _may_lock(probe: Probe) -> bool:
    """Whether the process has the capability, by number 14 of its effective ones."""
    status = probe.files.text("/proc/self/status") or ""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> 14 & 1)


def open_files(probe: Probe, site: Site) -> Finding:
    """Connections that a front end can hold."""
    bound = probe.limit(resource.RLIMIT_NOFILE)
    seen = "unlimited" if bound is None else f"{bound:,}"
    if site.part is Part.GPU:
        return skip(f"{seen}; the GPU runtime opens few")
    if bound is None or bound >= OPEN_FILES:
        return ok(seen)
    return warn(seen, f"{OPEN_FILES:,} for 8,192 connections with room: LimitNOFILE of containerd or the unit")


def shared_memory(probe: Probe, site: Site) -> Finding:
    """Room for the arena, and for what workers share."""
    size, free = probe.space(str(probe.files.path("/dev/shm")))
    seen = f"/dev/shm {size // _MIB:,} MiB, {free // _MIB:,} free"
    if free >= SHARED_BYTES:
        return ok(seen)
    todo = f"{SHARED_BYTES // _MIB} MiB for 64 channels: mount -o remount,size=… /dev/shm; in a pod sharedMemory"
    return fail(seen, todo) if free < _MIB * 2 else warn(seen, todo)


def huge_pages(probe: Probe, site: Site) -> Finding:
    """Blink asks for none; others may have taken the memory away."""
    lines = (line.split() for line in (probe.files.text("/proc/meminfo") or "").splitlines())
    known = {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1}
    if "MemTotal" not in known:
        return skip("/proc/meminfo is not to be read")
    taken = known.get("HugePages_Total", 0) * known.get("Hugepagesize", 0)
    seen = f"{known.get('HugePages_Total', 0):,} reserved, {taken // 1024:,} of {known['MemTotal'] // 1024:,} MiB"
    if 2 * taken <= known["MemTotal"]:
        return ok(f"{seen}; Blink needs none")
    return warn(seen, "more than half of the memory is set aside for others (vm.nr_hugepages); Blink needs none of it")


def _bytes(bound: int | None) -> str:
    return "unlimited" if bound is None else f"{bound // _MIB:,} MiB"
