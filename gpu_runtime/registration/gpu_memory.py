"""The arena in a CUDA device's memory, as RDMA devices can register it.

By dma-buf: the driver exports a range of device memory as a file descriptor (`cuMemGetHandleForAddressRange`), and the
RDMA device maps that (`ibv_reg_dmabuf_mr`, `doca_mmap_set_dmabuf_memrange`). The older way is the kernel module
nvidia-peermem, with which device addresses are registered like any others. A dma-buf begins on a page of its own: what
lies before the wanted memory there is skipped by the offset in it, and the address by which peers reach the first byte
is said explicitly, never assumed.

Visibility to a kernel that is running while the network card writes is not CUDA's formal promise. It is given where the
device reports that remote writes are seen in order by the GPU that owns the memory, which is checked here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blink_proto.rdma.binding import RdmaError
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.memory import Access, Domain, Part, Region

ORDERED_FOR_OWNER = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; an H200 reports it. 0: none, 200: all devices."""
PAGE = 64 << 10
"""Granularity of GPU memory in dma-bufs."""
PEERMEM = Path("/sys/module/nvidia_peermem")


@dataclass(frozen=True)
class RegionAddress:
    """Device memory of one of the arena's regions."""

    address: int
    size: int


def check_device(driver: Any, device: Any) -> None:
    """Refuses devices whose memory RDMA cannot be trusted with.

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


def has_dmabuf(driver: Any, device: Any) -> bool:
    """Whether the device's memory can be exported as a dma-buf."""
    return bool(_attribute(driver, driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, device))


class DmabufMemory:
    """See `ArenaMemory`. Each part is exported by itself, so that a key reaches no further than the part.

    Args:
        driver: `cuda.bindings.driver`, with the context that owns the memory.
    """

    def __init__(self, driver: Any, inbound: RegionAddress, outbound: RegionAddress) -> None:
        self._driver = driver
        self._regions = {True: inbound, False: outbound}

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """Exports the pages that the part lies in, and registers the part of them. The descriptor is closed again: the
        registration holds the memory."""
        start = _start_of(self._regions[part.inbound], part)
        first = start // PAGE * PAGE
        descriptor = self._export(first, -(-(start + part.size) // PAGE) * PAGE - first)
        try:
            return domain.register_dmabuf(descriptor, start - first, part.size, start, access)
        finally:
            os.close(descriptor)

    def _export(self, address: int, size: int) -> int:
        handle_type = self._driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        status, descriptor = self._driver.cuMemGetHandleForAddressRange(address, size, handle_type, 0)
        if int(status) != 0:
            raise RdmaError(f"the CUDA driver exports no dma-buf of this memory ({status.name})")
        return int(descriptor)


class PeermemMemory:
    """See `ArenaMemory`: registers device addresses through the nvidia-peermem module.

    Raises:
        RegistrationError: the module is not loaded.
    """

    def __init__(self, inbound: RegionAddress, outbound: RegionAddress, module: Path = PEERMEM) -> None:
        if not module.exists():
            raise RegistrationError("no dma-buf of this device's memory, and the module nvidia-peermem is not loaded")
        self._regions = {True: inbound, False: outbound}

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """As memory of this process."""
        return domain.register(_start_of(self._regions[part.inbound], part), part.size, access)


def _start_of(region: RegionAddress, part: Part) -> int:
    if part.offset < 0 or part.offset + part.size > region.size:
        raise RdmaError("a part that does not lie within the arena")
    return region.address + part.offset


def _attribute(driver: Any, name: Any, device: Any) -> int:
    status, value = driver.cuDeviceGetAttribute(name, device)
    if int(status) != 0:
        raise RegistrationError(f"the CUDA driver does not tell what its device can ({status.name})")
    return int(value)
