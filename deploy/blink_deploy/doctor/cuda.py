"""What the CUDA driver says of its devices, by its library alone: no package and no context is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_int, create_string_buffer
from dataclasses import dataclass, field

from blink_deploy.doctor.errors import UnknownError

LIBRARY = "libcuda.so.1"
ATTRIBUTES = {
    "capability_major": 75,
    "capability_minor": 76,
    "direct_rdma": 116,
    "write_ordering": 118,
    "dma_buf": 124,
}
"""Of `CUdevice_attribute`."""


@dataclass(frozen=True)
class Gpu:
    """A device: its name, its PCI address (`0000:17:00.0`) and the attributes by the names above."""

    name: str
    pci: str
    attributes: Mapping[str, int]


@dataclass(frozen=True)
class Gpus:
    """The driver and its devices. `cuda`: the CUDA version that the driver brings, (13, 0) for 13.0."""

    cuda: tuple[int, int]
    devices: list[Gpu] = field(default_factory=list)


def read_gpus(library: str = LIBRARY) -> Gpus:
    """Asks the driver.

    Raises:
        UnknownError: there is no driver, or it refuses.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise UnknownError(f"no CUDA driver: {library} cannot be loaded") from error
    _call(driver, "cuInit", 0)
    version, count = c_int(), c_int()
    _call(driver, "cuDriverGetVersion", byref(version))
    _call(driver, "cuDeviceGetCount", byref(count))
    devices = [_device(driver, index) for index in range(count.value)]
    return Gpus((version.value // 1000, version.value % 1000 // 10), devices)


def _device(driver: ctypes.CDLL, index: int) -> Gpu:
    handle, name, pci = c_int(), create_string_buffer(256), create_string_buffer(32)
    _call(driver, "cuDeviceGet", byref(handle), index)
    _call(driver, "cuDeviceGetName", name, len(name), handle)
    _call(driver, "cuDeviceGetPCIBusId", pci, len(pci), handle)
    return Gpu(_text(name), _text(pci).lower(), {key: _attribute(driver, handle, of) for key, of in ATTRIBUTES.items()})


def _attribute(driver: ctypes.CDLL, handle: c_int, number: int) -> int:
    value = c_int()
    _call(driver, "cuDeviceGetAttribute", byref(value), number, handle)
    return value.value


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode(errors="replace")


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(driver, function)(*arguments)
    if status:
        raise UnknownError(f"the CUDA driver refuses: {function} returned {status}")
