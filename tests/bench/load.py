"""Drives a client: open loop (arrivals by the clock) or closed loop (a fixed number of streams)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import suppress

from tests.bench.client import Client
from tests.bench.record import Record


class Load:
    """One run. `records` grows as answers end; those of requests that `stop` cancels are left out."""

    def __init__(self, client: Client, prompts: Iterator[str], limit: int = 0) -> None:
        self.records: list[Record] = []
        self.start = 0.0
        self.sent = 0
        self.peak_in_flight = 0
        self._client = client
        self._prompts = prompts
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests sent and not yet answered."""
        return self.sent - len(self.records)

    def stop(self) -> None:
        """Ends the run now: nothing more is sent, and what runs is cancelled."""
        self._stopped.set()
        for task in self._tasks:
            task.cancel()

    async def open(self, arrivals: Iterator[float], duration: float, requests: int = 0) -> None:
        """Sends each request when it is due, whether or not earlier ones were answered, then waits for the answers.

        Latency counts from the moment a request was due, so that a stalled server cannot make the generator omit the
        requests that would have met the stall. Arrivals past the limit on requests in flight are never sent and count
        as failures (`over_limit`). `requests` ends the run early; 0 means that only `duration` (seconds) does.
        """
        self.start = self._now()
        for due in arrivals:
            if due > duration or (requests and self.sent >= requests) or await self._stopped_before(self.start + due):
                break
            if self._limit and self.in_flight >= self._limit:
                self._refuse(self.start + due)
            else:
                self._count()
                self._spawn(self._one(self.start + due))
        await self._finish()

    async def closed(self, streams: int, duration: float, requests: int = 0) -> None:
        """Keeps `streams` requests running: each stream sends its next request when its last one was answered."""
        self.start = self._now()
        for _ in range(streams):
            self._spawn(self._stream(self.start + duration, requests))
        await self._finish()

    async def _stream(self, until: float, requests: int) -> None:
        while self._now() < until and not (requests and self.sent >= requests):
            self._count()
            await self._one(self._now())

    def _count(self) -> None:
        self.sent += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)

    async def _one(self, due: float) -> None:
        try:
            record = await self._client.measure(next(self._prompts), due)
        except asyncio.CancelledError:
            self.sent -= 1
            raise
        self.records.append(record)

    def _refuse(self, due: float) -> None:
        self.sent += 1
        now = self._now()
        self.records.append(Record(due=due, sent=now, end=now, error="over_limit"))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stopped_before(self, moment: float) -> bool:
        wait = moment - self._now()
        if wait > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), wait)
        else:
            await asyncio.sleep(0)  # behind schedule: requests that were already started go out first
        return self._stopped.is_set()

    async def _finish(self) -> None:
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
