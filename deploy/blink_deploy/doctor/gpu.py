"""The GPU: driver, attributes that RDMA needs, BAR1, clocks."""

from __future__ import annotations

from collections.abc import Callable

from blink_deploy.doctor.cuda import Gpu
from blink_deploy.doctor.errors import UnknownError
from blink_deploy.doctor.nvml import Board
from blink_deploy.doctor.probe import Probe
from blink_deploy.doctor.report import Finding, fail, ok, skip, warn, worst
from blink_deploy.doctor.site import Part, Site, Transport

OLDEST_CUDA = (13, 0)
OLDEST_CAPABILITY = (9, 0)
OWNER_ORDER = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER."""
BAR1_BYTES = 256 << 20
PEERMEM = "/sys/module/nvidia_peermem"
_MIB = 1 << 20


def driver(probe: Probe, site: Site) -> Finding:
    """A CUDA driver that is new enough, and devices that are."""
    try:
        gpus = probe.gpus()
    except UnknownError as error:
        if site.part is Part.SINGLE:
            return skip(f"{error}; the soft GPU (--device cpu) needs none")
        return fail(str(error), "install NVIDIA's driver 580 or newer with the open kernel modules")
    seen = f"CUDA {_dotted(gpus.cuda)}, " + (", ".join(_describe(gpu) for gpu in gpus.devices) or "no device")
    if not gpus.devices:
        return fail(seen, "look at nvidia-smi and dmesg; in a container ask for the GPU resource")
    if gpus.cuda < OLDEST_CUDA:
        return fail(seen, f"the kernels need a driver for CUDA {_dotted(OLDEST_CUDA)}: 580 or newer")
    if min(map(_capability, gpus.devices)) < OLDEST_CAPABILITY:
        return fail(seen, f"the kernels need compute capability {_dotted(OLDEST_CAPABILITY)}: Hopper or newer")
    return ok(seen)


def direct_rdma(probe: Probe, site: Site) -> Finding:
    """Whether others on the bus may reach the device's memory at all."""
    return _of_each(probe, lambda gpu: _flag(gpu, "direct_rdma", "GPUDirect RDMA", "no transport over RDMA can work"))


def dma_buf(probe: Probe, site: Site) -> Finding:
    """Whether memory can be handed to the RDMA device as a dma-buf; the older way does for verbs."""
    todo = "use the driver's open kernel modules and Linux 5.12 or newer"

    def look(gpu: Gpu) -> Finding:
        if not gpu.attributes["dma_buf"] and peermem_serves(probe, site):
            return warn(f"{gpu.name}: dma-buf no, nvidia-peermem serves instead", todo)
        return _flag(gpu, "dma_buf", "dma-buf", todo)

    return _of_each(probe, look)


def write_order(probe: Probe, site: Site) -> Finding:
    """Whether the device sees the writes of others in their order."""

    def look(gpu: Gpu) -> Finding:
        found = gpu.attributes["write_ordering"]
        words = {0: "none", 100: "owner", 200: "all devices"}.get(found, "unknown")
        seen = f"{gpu.name}: GPUDirect write ordering {found} ({words})"
        if found >= OWNER_ORDER:
            return ok(seen)
        return fail(seen, "a commit word could be seen before what it commits: take a GPU or platform with 100 (owner)")

    return _of_each(probe, look)


def bar1(probe: Probe, site: Site) -> Finding:
    """Whether what RDMA reaches of the device's memory fits the window on the bus."""

    def look(board: Board) -> Finding:
        seen = f"{board.name}: BAR1 {board.bar1 // _MIB:,} MiB"
        if board.bar1 >= BAR1_BYTES:
            return ok(seen)
        return fail(
            seen, f"at least {BAR1_BYTES // _MIB} MiB: switch on large BARs (Above 4G decoding) in the firmware"
        )

    return _of_boards(probe, look)


def persistence(probe: Probe, site: Site) -> Finding:
    """Whether the driver keeps the device ready between programs."""

    def look(board: Board) -> Finding:
        if board.persistent:
            return ok(f"{board.name}: on")
        return warn(f"{board.name}: off", "nvidia-smi -pm 1, or the service nvidia-persistenced: starts get faster")

    return _of_boards(probe, look)


def clocks(probe: Probe, site: Site) -> Finding:
    """Whether heat or power slow the device down now."""

    def look(board: Board) -> Finding:
        seen = f"{board.name}: {board.clock:,} of {board.most:,} MHz"
        if not board.reasons:
            return ok(seen)
        return warn(f"{seen}, slowed by {', '.join(board.reasons)}", "cooling and power: nvidia-smi -q -d PERFORMANCE")

    return _of_boards(probe, look)


def open_modules(probe: Probe, site: Site) -> Finding:
    """Which of NVIDIA's kernel modules are loaded."""
    text = probe.files.text("/proc/driver/nvidia/version")
    if text is None:
        return skip("no /proc/driver/nvidia/version: no driver here, or a container that hides it")
    line = text.splitlines()[0]
    if "Open Kernel Module" in line:
        return ok(line)
    todo = "dma-buf needs the open kernel modules (the GPU Operator's driver.kernelModuleType: open)"
    return warn(line, todo) if peermem_serves(probe, site) else fail(line, todo)


def peermem_serves(probe: Probe, site: Site) -> bool:
    """The module is there, and the transport can use it: each of DOCA's memory maps belongs to the process that made
    it, and by nvidia-peermem only the owner of the memory can register it.
    """
    return probe.files.exists(PEERMEM) and site.transport is not Transport.DOCA


def peermem(probe: Probe, site: Site) -> Finding:
    """The older way of registering GPU memory, for the verbs transport where there are no dma-bufs."""
    needed = not all(gpu.attributes["dma_buf"] for gpu in probe.gpus().devices)
    if not probe.files.exists(PEERMEM):
        if needed:
            return fail(
                "nvidia-peermem is not loaded, nor is there dma-buf", "see gpu-dma-buf; or modprobe nvidia-peermem"
            )
        return ok("nvidia-peermem is not loaded, and not needed")
    if not needed:
        return ok("nvidia-peermem is loaded, and not used unless --gpu-memory peermem says so")
    if peermem_serves(probe, site):
        return ok("nvidia-peermem is loaded, and serves where there is no dma-buf")
    return fail(
        "nvidia-peermem is loaded, which the doca transport cannot use", "see gpu-dma-buf; or --transport verbs"
    )


def _of_each(probe: Probe, look: Callable[[Gpu], Finding]) -> Finding:
    devices = probe.gpus().devices
    return worst([look(gpu) for gpu in devices]) if devices else skip("no device")


def _of_boards(probe: Probe, look: Callable[[Board], Finding]) -> Finding:
    boards = probe.boards()
    return worst([look(board) for board in boards]) if boards else skip("no board")


def _flag(gpu: Gpu, attribute: str, words: str, todo: str) -> Finding:
    if gpu.attributes[attribute]:
        return ok(f"{gpu.name}: {words} yes")
    return fail(f"{gpu.name}: {words} no", todo)


def _describe(gpu: Gpu) -> str:
    return f"{gpu.name} (compute {_dotted(_capability(gpu))}, {gpu.pci})"


def _capability(gpu: Gpu) -> tuple[int, int]:
    return gpu.attributes["capability_major"], gpu.attributes["capability_minor"]


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
