"""The first state of a scheduler in device memory (`image.h`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.native import load_library
from gpu_runtime.scheduler.host import PLAN_FIELDS, SchedulerError

_COLD_BYTES = 48


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("image_bytes", "total_bytes", "shared_bytes")]


class _View(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_uint64) for name in PLAN_FIELDS), ("cold", ctypes.c_uint8 * _COLD_BYTES)]


@dataclass(frozen=True)
class ImageSizes:
    """Bytes: of the image, of the device memory that begins with it and is zero beyond, and of shared memory."""

    image: int
    total: int
    shared: int


@dataclass(frozen=True)
class Image:
    """What is copied to the start of the scheduler's memory, and what lies where: device addresses by the names of
    `PLAN_FIELDS`, and the argument of the kernel that runs a step (a blink::ColdArrays)."""

    content: NDArray[np.uint8]
    addresses: dict[str, int]
    cold: bytes


def measure(config: NDArray[np.void]) -> ImageSizes:
    """Sizes for a `layout.SchedulerConfig` that the scheduler accepts."""
    sizes = _Sizes()
    load_library("_host_scheduler").blink_image_measure(ctypes.c_void_p(config.ctypes.data), ctypes.byref(sizes))
    return ImageSizes(sizes.image_bytes, sizes.total_bytes, sizes.shared_bytes)


def make(config: NDArray[np.void], base: int, inbound: int, outbound: int) -> Image:
    """The image for device memory at `base` and regions at `inbound` and `outbound`, all device addresses.

    Raises:
        SchedulerError: the configuration is wrong.
    """
    library = load_library("_host_scheduler")
    library.blink_image_make.restype = ctypes.c_char_p
    library.blink_image_make.argtypes = [ctypes.c_void_p, *(ctypes.c_uint64,) * 3, ctypes.c_void_p, ctypes.c_void_p]
    content, view = _aligned(measure(config).image), _View()
    wrong = library.blink_image_make(
        config.ctypes.data, base, inbound, outbound, content.ctypes.data, ctypes.addressof(view)
    )
    if wrong:
        raise SchedulerError(f"scheduler configuration: {wrong.decode()}")
    return Image(content, {name: getattr(view, name) for name in PLAN_FIELDS}, bytes(view.cold))


@dataclass(frozen=True)
class Rehearsal:
    """A scheduler in a steady state whose steps nobody sees (`rehearsal.h`): the content of its device memory, and the
    argument of the kernel that runs a step of it."""

    content: NDArray[np.uint8]
    cold: bytes


def rehearsal_bytes() -> int:
    """Device memory of a rehearsal."""
    library = load_library("_host_scheduler")
    library.blink_rehearsal_bytes.restype = ctypes.c_uint64
    return int(library.blink_rehearsal_bytes())


def make_rehearsal(base: int) -> Rehearsal:
    """A rehearsal for device memory at `base`."""
    library = load_library("_host_scheduler")
    library.blink_rehearsal_make.restype = None
    library.blink_rehearsal_make.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    content, cold = _aligned(rehearsal_bytes()), np.zeros(_COLD_BYTES, np.uint8)
    library.blink_rehearsal_make(base, content.ctypes.data, cold.ctypes.data)
    return Rehearsal(content, cold.tobytes())


def _aligned(size: int) -> NDArray[np.uint8]:
    """Bytes on a 64-byte boundary."""
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]
