"""The time that a client gives a request: `X-Request-Timeout`, in seconds from its arrival."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dpu_service.api.errors import ApiError, bad_value, deadline_passed
from dpu_service.api.exchange import Exchange

HEADER = b"x-request-timeout"
LONGEST_SECONDS = 86_400.0
T = TypeVar("T")


class Deadline:
    """When a request's answer is no longer wanted.

    Raises:
        ApiError: 400, the header is no number of seconds.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        text = exchange.headers.get(HEADER)
        self._at = None if text is None else exchange.arrived + _seconds(text)
        self._timer: asyncio.TimerHandle | None = None

    async def keep(self, work: Awaitable[T]) -> T:
        """The result of work that ends before.

        Raises:
            ApiError: 504, it does not.
        """
        try:
            async with asyncio.timeout(self._left()):
                return await work
        except TimeoutError:
            raise self._passed() from None

    def watch(self, callback: Callable[[], None]) -> None:
        """Calls back then, unless stopped."""
        left = self._left()
        if left is not None:
            self._timer = asyncio.get_running_loop().call_later(left, self._fire, callback)

    def stop(self) -> None:
        """The request is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _left(self) -> float | None:
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def _fire(self, callback: Callable[[], None]) -> None:
        self._passed()
        callback()

    def _passed(self) -> ApiError:
        self._exchange.extra[b"x-should-retry"] = b"false"  # OpenAI's clients would ask again for what nobody awaits
        return deadline_passed()


def _seconds(text: bytes) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_SECONDS:
        raise bad_value("X-Request-Timeout", f"the header is no number of seconds up to {LONGEST_SECONDS:.0f}")
    return seconds
