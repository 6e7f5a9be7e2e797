"""Whether the kernel says that its clock is set by another one."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

from blink_deploy.doctor.errors import UnknownError

_UNSYNCHRONISED = 0x40
"""STA_UNSYNC of <sys/timex.h>."""


@dataclass(frozen=True)
class Clock:
    """`error` is the kernel's bound of it, in seconds."""

    synchronised: bool
    error: float


class _Timex(ctypes.Structure):
    """`struct timex` up to what is read, with room for the rest (64-bit Linux)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock() -> Clock:
    """Asks the kernel, and changes nothing (`modes` is 0).

    Raises:
        UnknownError: it does not tell.
    """
    if sys.platform != "linux":
        raise UnknownError("only Linux tells")
    timex = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        raise UnknownError("the kernel does not tell (adjtimex)")
    return Clock(not timex.status & _UNSYNCHRONISED, timex.maxerror / 1e6)
