"""The runtime's state as others see it, and the way every change of it gets to them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from blink_proto import control_pb2
from blink_proto.control_pb2 import Phase

MOST_WAITING = 16
"""Changes that wait for one watcher at most. Beyond them the oldest is left out: what counts is the latest."""


class _Watcher:
    def __init__(self, first: control_pb2.State) -> None:
        self.waiting = deque([first], maxlen=MOST_WAITING)
        self.news = asyncio.Event()
        self.news.set()

    def put(self, state: control_pb2.State) -> None:
        self.waiting.append(state)
        self.news.set()


class Watch:
    """The present state, and a bounded queue for everybody who follows it. Belongs to one event loop."""

    def __init__(self) -> None:
        self.state = control_pb2.State(phase=Phase.PHASE_IDLE)
        self._watchers: set[_Watcher] = set()

    def set(self, phase: Phase, epoch: int, model: str = "", detail: str = "", life: int = 0) -> None:
        """Moves to another state."""
        self.state = control_pb2.State(phase=phase, epoch=epoch, model=model, detail=detail, life=life)
        for watcher in self._watchers:
            watcher.put(self.state)

    async def follow(self, every: float | None = None) -> AsyncIterator[control_pb2.State]:
        """The present state, then every later one; who is too slow misses some of those between, never the latest.

        Args:
            every: seconds without a change after which the present state comes again; None: never.
        """
        watcher = _Watcher(self.state)
        self._watchers.add(watcher)
        try:
            while True:
                if not await _is_set(watcher.news, every):
                    yield self.state
                    continue
                yield watcher.waiting.popleft()
                if not watcher.waiting:
                    watcher.news.clear()
        finally:
            self._watchers.discard(watcher)


async def _is_set(event: asyncio.Event, seconds: float | None) -> bool:
    """Waits so long for it."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
