"""Sleeps shorter than a millisecond, in which the timers of uvloop and asyncio count."""

from __future__ import annotations

import asyncio
import ctypes
import os
from types import TracebackType
from typing import Self

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
"""TFD_NONBLOCK and TFD_CLOEXEC are the same bits."""


class _Setting(ctypes.Structure):
    """`struct itimerspec`: interval and first expiry, each in seconds and nanoseconds."""

    every_s: int
    every_ns: int
    after_s: int
    after_ns: int
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "after_s", "after_ns")]


class Alarm:
    """Linux's timer as a file descriptor (timerfd_create(2)), watched by the event loop. One sleeper at a time.

    Raises:
        OSError: the process has no descriptor left.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._library.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._setting = _Setting()
        self._sleeper: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._descriptor, self._ring)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    async def sleep(self, seconds: float) -> None:
        """Returns after so many seconds, above 0."""
        self._setting.after_s, self._setting.after_ns = divmod(max(int(1e9 * seconds), 1), 10**9)
        if self._library.timerfd_settime(self._descriptor, 0, ctypes.byref(self._setting), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._sleeper = asyncio.get_running_loop().create_future()
        await self._sleeper

    def _ring(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # set anew meanwhile: it rings again
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
