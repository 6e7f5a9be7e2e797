"""The first state of a scheduler in device memory (`image.h`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.native import load_library
from gpu_runtime.scheduler.host import PLAN_FIELDS, SchedulerError


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("image_bytes", "total_bytes")]


class _View(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in PLAN_FIELDS]


@dataclass(frozen=True)
class ImageSizes:
    """Bytes: of the image, and of the device memory that begins with it and is zero beyond."""

    image: int
    total: int


@dataclass(frozen=True)
class Image:
    """What is copied to the start of the scheduler's memory, and what lies where: device addresses by the names of
    `PLAN_FIELDS`. The blink::State comes first."""

    content: NDArray[np.uint8]
    addresses: dict[str, int]


def measure(config: NDArray[np.void]) -> ImageSizes:
    """Sizes for a `layout.SchedulerConfig` that the scheduler accepts."""
    sizes = _Sizes()
    load_library("_host_scheduler").blink_image_measure(ctypes.c_void_p(config.ctypes.data), ctypes.byref(sizes))
    return ImageSizes(sizes.image_bytes, sizes.total_bytes)


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
    return Image(content, {name: getattr(view, name) for name in PLAN_FIELDS})


def _aligned(size: int) -> NDArray[np.uint8]:
    """Bytes on a 64-byte boundary."""
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]
