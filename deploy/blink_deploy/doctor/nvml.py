"""What NVIDIA's management library says of the boards."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer
from dataclasses import dataclass

from blink_deploy.doctor.errors import UnknownError

LIBRARY = "libnvidia-ml.so.1"
_MULTIPROCESSOR_CLOCK = 1
SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "software heat", 0x40: "hardware heat", 0x80: "power brake"}
"""Of `nvmlClocksEventReasons`: those that a healthy board does not have."""


@dataclass(frozen=True)
class Board:
    """BAR1 in bytes, clocks in MHz; `slowed` is a mask of reasons."""

    name: str
    bar1: int
    persistent: bool
    clock: int
    most: int
    slowed: int

    @property
    def reasons(self) -> list[str]:
        """Why it is slowed down, in words."""
        return [words for bit, words in SLOWDOWNS.items() if self.slowed & bit]


class _Bar1(ctypes.Structure):
    """`nvmlBAR1Memory_t`."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


def read_boards(library: str = LIBRARY) -> list[Board]:
    """All boards of this machine.

    Raises:
        UnknownError: the library is missing, or refuses.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise UnknownError(f"{library} cannot be loaded") from error
    _call(nvml, "nvmlInit_v2")
    try:
        count = c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", byref(count))
        return [_board(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def _board(nvml: ctypes.CDLL, index: int) -> Board:
    handle, name, bar1 = c_void_p(), create_string_buffer(96), _Bar1()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", index, byref(handle))
    _call(nvml, "nvmlDeviceGetName", handle, name, len(name))
    _call(nvml, "nvmlDeviceGetBAR1MemoryInfo", handle, byref(bar1))
    persistent, clock, most, reasons = c_int(), c_uint(), c_uint(), c_ulonglong()
    _call(nvml, "nvmlDeviceGetPersistenceMode", handle, byref(persistent))
    _call(nvml, "nvmlDeviceGetClockInfo", handle, _MULTIPROCESSOR_CLOCK, byref(clock))
    _call(nvml, "nvmlDeviceGetMaxClockInfo", handle, _MULTIPROCESSOR_CLOCK, byref(most))
    _call(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle, byref(reasons))
    text = name.value.decode(errors="replace")
    return Board(text, bar1.total, bool(persistent.value), clock.value, most.value, reasons.value)


def _call(nvml: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(nvml, function)(*arguments)
    if status:
        raise UnknownError(f"NVML refuses: {function} returned {status}")
