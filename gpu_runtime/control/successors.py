"""Which front end had which channel last, and what the next one waits for.

A lease leaves no answers in its log and begins without anybody's records and prompts, and the keys of whoever had the
channel are revoked before. Two ways are left, both by asking for a lease as the last act. A run of the scheduler that
has accepted it but not shown it yet would have the next front end ask for the same lease, and take for its own what
stands in the rings since. And what was submitted under it is answered in a log that the next front end may read. So a
channel goes to somebody else only when the runs have ended that may have been under way when the keys were revoked, and
only without a lease: what they accepted shows then, and what a later one accepts begins with rings that nobody else can
reach.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_runtime.control.errors import NotReadyError
from gpu_runtime.shared_arena import SharedArena

RUN_SECONDS = 5.0
"""The scheduler runs once a step, and every 20 ms (on the soft GPU 50 ms) when it is idle."""
RUNS = 2
"""When a device's heartbeat comes to host memory, the leases of the same run are still under way; they are there when
the next one comes."""
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Holder:
    """A front end as it may hold a channel."""

    front_end: str
    owner: str
    """Subject of its certificate."""
    is_local: bool
    """It maps the whole arena: there is nothing to keep from it that another such one had."""

    def takes_over(self, earlier: Holder) -> bool:
        """Whether something of an earlier holder is to be kept from this one, or its writes from counting."""
        same = (self.front_end, self.owner) == (earlier.front_end, earlier.owner)
        return not same and not (self.is_local and earlier.is_local)


class Successors:
    """See the module.

    Args:
        is_live: whether a channel has a lease, as the device says.
        is_over: whether nobody is to be let in any more.
    """

    def __init__(self, shared: SharedArena, is_live: Callable[[int], bool], is_over: Callable[[], bool]) -> None:
        self._arena, self._is_live, self._is_over = shared, is_live, is_over
        self._last: dict[int, Holder] = {}

    async def wait(self, channels: tuple[int, ...], holder: Holder) -> None:
        """To be called when nobody else reaches the channels any more. Returns at once when nobody else had one.

        Raises:
            NotReadyError: the device does not go on, or a lease began meanwhile.
        """
        others = [channel for channel in channels if holder.takes_over(self._last.get(channel, holder))]
        if not others:
            return
        for _ in range(RUNS):
            await self._wait_for_run()
        if any(map(self._is_live, others)) and not self._is_over():
            raise NotReadyError("a front end that had a channel before has just taken its lease again: ask once more")

    async def _wait_for_run(self) -> None:
        seen, deadline = self._heartbeat(), time.monotonic() + RUN_SECONDS
        while self._heartbeat() == seen and not self._is_over():
            if time.monotonic() >= deadline:
                raise NotReadyError("the device does not go on, so that channels cannot be given to another front end")
            await asyncio.sleep(_LOOK_SECONDS)

    def note(self, channels: tuple[int, ...], holder: Holder) -> None:
        """They are given to it."""
        self._last.update(dict.fromkeys(channels, holder))

    def _heartbeat(self) -> int:
        return int(self._arena.telemetry[0]["heartbeat"])
