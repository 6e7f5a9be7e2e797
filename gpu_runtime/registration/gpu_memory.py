"""The arena in a CUDA device's memory, as its owner, the chain's process, gives it away for RDMA.

The driver exports ranges of device memory as dma-bufs (`cuMemGetHandleForAddressRange`), whose descriptors the chain's
process hands to the control process. RDMA devices map them (`ibv_reg_dmabuf_mr`, `doca_mmap_set_dmabuf_memrange`).
The older way, the kernel module nvidia-peermem, is not used: by it only the process that owns the memory can register
it, and sessions belong to the control process.

Visibility to a kernel that is running while the network card writes is not CUDA's formal promise. It is given where the
device reports that remote writes are seen in order by the GPU that owns the memory, which is checked here.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.handover import PAGE, Exported, send_regions

ORDERED_FOR_OWNER = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; an H200 reports it. 0: none, 200: all devices."""


@dataclass(frozen=True)
class RegionAddress:
    """Device memory of one of the arena's regions, in whole pages."""

    address: int = field(repr=False)
    size: int


def check_device(driver: Any, device: Any) -> None:
    """Refuses devices whose memory RDMA cannot reach, or cannot be trusted with.

    Args:
        driver: `cuda.bindings.driver`.
        device: a CUdevice.

    Raises:
        RegistrationError: it says what is missing.
    """
    names = driver.CUdevice_attribute
    if not _attribute(driver, names.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, device):
        raise RegistrationError("this CUDA device does not support GPUDirect RDMA")
    ordering = _attribute(driver, names.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, device)
    if ordering < ORDERED_FOR_OWNER:
        raise RegistrationError(
            f"this CUDA device promises no order of RDMA writes (its write ordering is {ordering}, "
            f"{ORDERED_FOR_OWNER} is needed): a commit word could be seen before its payload"
        )
    if not _attribute(driver, names.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, device):
        raise RegistrationError(
            "this CUDA device's memory cannot be exported as dma-bufs, which RDMA needs here: that takes NVIDIA's open "
            "kernel modules and Linux 5.12 or newer (nvidia-peermem would not help)"
        )


def hand_over(driver: Any, device: Any, inbound: RegionAddress, outbound: RegionAddress, to: socket.socket) -> None:
    """Exports both regions of the arena and gives them to the control process.

    Args:
        driver, device: see `check_device`; with the context that owns the memory.

    Raises:
        RegistrationError: the device cannot be trusted, or the driver exports nothing.
    """
    check_device(driver, device)
    with ExitStack() as undo:
        regions = []
        for region in (inbound, outbound):
            regions.append(_export(driver, region))
            undo.callback(regions[-1].close)
        send_regions(to, *regions)


def _export(driver: Any, region: RegionAddress) -> Exported:
    if region.address % PAGE or region.size % PAGE:
        raise RegistrationError("memory that does not lie on pages cannot be exported")
    handle_type = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    status, descriptor = driver.cuMemGetHandleForAddressRange(region.address, region.size, handle_type, 0)
    if int(status) != 0:
        raise RegistrationError(f"the CUDA driver exports no dma-buf of the arena ({status.name})")
    return Exported(int(descriptor), region.address, region.size)


def _attribute(driver: Any, name: Any, device: Any) -> int:
    status, value = driver.cuDeviceGetAttribute(name, device)
    if int(status) != 0:
        raise RegistrationError(f"the CUDA driver does not tell what its device can ({status.name})")
    return int(value)
