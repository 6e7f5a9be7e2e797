"""The two ways in which an RDMA device gets at a CUDA device's memory, and which of them is taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_runtime.registration.base import RegistrationError

AUTO, DMA_BUF, PEERMEM = "auto", "dma-buf", "peermem"
CHOICES = (AUTO, DMA_BUF, PEERMEM)
MODULE = Path("/sys/module/nvidia_peermem")
NO_DOCA = (
    "the doca transport reaches GPU memory by dma-bufs alone: by nvidia-peermem only the process that owns the memory "
    "can register it, and each DOCA memory map belongs to the process that made it"
)
_NO_DMA_BUF = (
    "this CUDA device's memory cannot be exported as dma-bufs: that takes NVIDIA's open kernel modules and Linux 5.12 "
    "or newer"
)
_NO_MODULE = "the kernel module nvidia-peermem is not loaded"


@dataclass(frozen=True)
class Wish:
    """How the operator wants RDMA devices to get at the device's memory.

    `way`: one of `CHOICES`; `doca`: front ends may come by the doca transport.
    """

    way: str = AUTO
    doca: bool = False


def has_peermem() -> bool:
    """The kernel module is loaded; it does not load where RDMA's kernel modules have no place for it."""
    return MODULE.exists()


def choose_way(wish: Wish, *, dma_buf: bool, peermem: bool) -> str:
    """`DMA_BUF` where the device has that and nothing else is wished for, or `PEERMEM`.

    Args:
        dma_buf, peermem: what there is.

    Raises:
        RegistrationError: what is wished for, or both ways, are not there.
    """
    if wish.way == DMA_BUF and not dma_buf:
        raise RegistrationError(f"{_NO_DMA_BUF} (--gpu-memory {DMA_BUF})")
    if wish.way == PEERMEM and not peermem:
        raise RegistrationError(f"{_NO_MODULE} (--gpu-memory {PEERMEM})")
    if dma_buf and wish.way != PEERMEM:
        return DMA_BUF
    if not peermem:
        raise RegistrationError(f"{_NO_DMA_BUF}; and for the older way {_NO_MODULE}")
    if wish.doca:
        raise RegistrationError(NO_DOCA if wish.way == PEERMEM else f"{_NO_DMA_BUF}; {NO_DOCA}")
    return PEERMEM
