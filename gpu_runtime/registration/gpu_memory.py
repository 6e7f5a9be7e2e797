"""The arena in a CUDA device's memory, as its owner, the chain's process, gives it away for RDMA.

In one of two ways:

- The driver exports ranges of device memory as dma-bufs (`cuMemGetHandleForAddressRange`), whose descriptors the
  chain's process hands to the control process. RDMA devices map them (`ibv_reg_dmabuf_mr`,
  `doca_mmap_set_dmabuf_memrange`).
- Where there are none, the kernel module nvidia-peermem lets the process that owns the memory register it by its
  address, so the chain's process does that at the control process's request (`peermem_owner`).

Visibility to a kernel that is running while the network card writes is not CUDA's formal promise. It is given where
the device reports that remote writes are seen in order by the GPU that owns the memory, which is checked here for both.

CUDA's synchronous copies may return before they have ended, and an RDMA device would then see what was there before.
NVIDIA's guide to GPUDirect RDMA has programs forbid that for what they register (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS), so
it is set. All of our own copies are asynchronous ones that are waited for, which it does not change.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.handover import PAGE, Exported, RegionAddress, send_addresses, send_regions
from gpu_runtime.registration.ways import PEERMEM, Wish, choose_way, has_peermem

ORDERED_FOR_OWNER = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; an H200 reports it. 0: none, 200: all devices."""


def check_device(driver: Any, device: Any, wish: Wish) -> str:
    """Refuses devices whose memory RDMA cannot reach, or cannot be trusted with; the way to reach it, see `choose_way`.

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
    dma_buf = bool(_attribute(driver, names.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, device))
    return choose_way(wish, dma_buf=dma_buf, peermem=has_peermem())


def hand_over(
    driver: Any, device: Any, wish: Wish, inbound: RegionAddress, outbound: RegionAddress, to: socket.socket
) -> str:
    """Lends both regions of the arena to the control process; the way in which that is done.

    Args:
        driver, device: see `check_device`; with the context that owns the memory.

    Raises:
        RegistrationError: the device cannot be trusted, or the driver exports nothing.
    """
    way = check_device(driver, device, wish)
    for region in (inbound, outbound):
        if region.address % PAGE or region.size % PAGE:
            raise RegistrationError("memory that does not lie on pages cannot be registered")
        _synchronize(driver, region)
    if way == PEERMEM:
        send_addresses(to, inbound, outbound)
        return way
    with ExitStack() as undo:
        regions = []
        for region in (inbound, outbound):
            regions.append(_export(driver, region))
            undo.callback(regions[-1].close)
        send_regions(to, *regions)
    return way


def _export(driver: Any, region: RegionAddress) -> Exported:
    handle_type = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    status, descriptor = driver.cuMemGetHandleForAddressRange(region.address, region.size, handle_type, 0)
    if int(status) != 0:
        raise RegistrationError(f"the CUDA driver exports no dma-buf of the arena ({status.name})")
    return Exported(int(descriptor), region.address, region.size)


def _synchronize(driver: Any, region: RegionAddress) -> None:
    """See the module. The attribute is one of a whole allocation, and set at its beginning."""
    status, start, _ = driver.cuMemGetAddressRange(region.address)
    if int(status) == 0:
        name = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        (status,) = driver.cuPointerSetAttribute(1, name, start)
    if int(status) != 0:
        raise RegistrationError(f"the CUDA driver does not make copies to the arena synchronous ({status.name})")


def _attribute(driver: Any, name: Any, device: Any) -> int:
    status, value = driver.cuDeviceGetAttribute(name, device)
    if int(status) != 0:
        raise RegistrationError(f"the CUDA driver does not tell what its device can ({status.name})")
    return int(value)
