"""Which front end had which channel over RDMA last, and what the next one waits for.

A lease begins with empty rings, and the keys of whoever had the channel are revoked before. One way is left to plant a
record: to ask for a lease as the last act. A run of the scheduler that has accepted it but not shown it yet would have
the next front end ask for the same lease, and take for its own what stands in the rings since. So a channel goes to
somebody else only when the run has ended that may have been under way when the keys were revoked: what it accepted
shows then, and what a later one accepts begins with rings that nobody else can reach.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gpu_runtime.control.errors import NotReadyError
from gpu_runtime.shared_arena import SharedArena

RUN_SECONDS = 5.0
"""The scheduler runs once a step, and every 20 ms (on the soft GPU 50 ms) when it is idle."""
_LOOK_SECONDS = 0.002

Holder = tuple[str, str]
"""Name of a front end, and subject of its certificate."""


class Successors:
    """See the module.

    Args:
        is_over: whether nobody is to be let in any more.
    """

    def __init__(self, shared: SharedArena, is_over: Callable[[], bool]) -> None:
        self._arena, self._is_over = shared, is_over
        self._last: dict[int, Holder] = {}

    async def wait(self, channels: tuple[int, ...], holder: Holder) -> None:
        """To be called when the keys of whoever had the channels are revoked. Returns at once when nobody else had one.

        Raises:
            NotReadyError: the device does not go on.
        """
        if all(self._last.get(channel, holder) == holder for channel in channels):
            return
        seen, deadline = self._heartbeat(), time.monotonic() + RUN_SECONDS
        while self._heartbeat() == seen and not self._is_over():
            if time.monotonic() >= deadline:
                raise NotReadyError("the device does not go on, so that channels cannot be given to another front end")
            await asyncio.sleep(_LOOK_SECONDS)

    def note(self, channels: tuple[int, ...], holder: Holder) -> None:
        """They are given to a front end that comes by RDMA."""
        self._last.update(dict.fromkeys(channels, holder))

    def _heartbeat(self) -> int:
        return int(self._arena.telemetry[0]["heartbeat"])
