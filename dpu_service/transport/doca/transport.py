"""The arena behind one DOCA connection: writes go out in order, reads bring parts of a local copy up to date."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from blink_proto.doca.constants import Status
from blink_proto.doca.errors import DocaError
from dpu_service.transport.base import STUCK_SECONDS, Range, TransportError
from dpu_service.transport.doca.session import DocaSession
from dpu_service.transport.doca.tasks import TaskPool

log = logging.getLogger(__name__)

WORD = 8
FAREWELL_SECONDS = 0.1
"""At the end: for what was written last, the lease given back among it, to get out."""
_PAUSE_SECONDS = 0.0002


@dataclass(frozen=True)
class _Part:
    """A part of the outbound region: where it begins, its local copy, and the tasks that refresh it."""

    offset: int
    copy: bytearray
    pool: TaskPool

    def holds(self, offset: int, size: int) -> bool:
        return self.offset <= offset and offset + size <= self.offset + len(self.copy)


@dataclass
class _Fetch:
    """Reads that show together, so that nobody sees the later ranges older than the earlier ones."""

    ticket: int
    under_way: int = 0
    landed: list[tuple[_Part, int, bytes]] = field(default_factory=list)
    """Where in which local copy what belongs."""


@dataclass(frozen=True)
class _Read:
    fetch: _Fetch
    part: _Part
    at: int
    size: int


class DocaTransport:
    """See `Transport`. Belongs to one thread. Callbacks only note what is done (`DocaSession`); the rest happens here.

    Args:
        session: connected.
    """

    def __init__(self, session: DocaSession) -> None:
        self._session = session
        self._inbound_offset = session.inbound_offset
        self._writes = session.writes
        self._parts = [
            _Part(offset, bytearray(pool.place.size), pool)
            for offset, pool in ((0, session.head_reads), (session.outbound_offset, session.channel_reads))
        ]
        self._backlog: deque[tuple[int, bytes | memoryview]] = deque()
        self._reads: dict[int, _Read] = {}
        self._last_ticket = 0
        self._moved = 0.0
        """When the device last did something, or had something to do again."""
        self._failure = ""

    def write(self, offset: int, payload: bytes) -> None:
        """Submits tasks, or keeps the payload until tasks are free again; what may wait is bounded by the rings."""
        self._check()
        at = self._within_inbound(offset, len(payload))
        view = memoryview(payload)
        for start in range(0, len(payload), self._writes.unit):
            self._backlog.append((at + start, view[start : start + self._writes.unit]))
        self._send()

    def commit(self, offset: int, word: int) -> None:
        """A task of its own, behind those of all earlier writes: on one connection they take effect in order."""
        self._check()
        if offset % WORD:
            raise TransportError(f"a word at {offset} is not aligned")
        self._backlog.append((self._within_inbound(offset, WORD), word.to_bytes(WORD, "little")))
        self._send()

    def read(self, offset: int, size: int) -> bytes:
        """Of the local copy."""
        self._collect()
        part = self._part(offset, size)
        return bytes(part.copy[offset - part.offset : offset - part.offset + size])

    def fetch(self, *ranges: Range) -> int:
        """One read for each range, all or none."""
        self._collect()
        wanted = [piece for one in ranges for piece in self._pieces(one)]
        if self._lacks_room(wanted):
            return self._last_ticket + 1  # of the next fetch, which is not earlier than asked
        self._last_ticket += 1
        fetch = _Fetch(self._last_ticket)
        self._note_start()
        for part, at, size in wanted:
            try:
                number = part.pool.read(at, size)
            except DocaError as error:
                self._fail(str(error))
            self._reads[number] = _Read(fetch, part, at, size)
            fetch.under_way += 1
        self._arm()
        return self._last_ticket

    def fetched(self, ticket: int) -> bool:
        """Whether no read up to the ticket is under way."""
        self._collect()
        return ticket <= self._last_ticket and all(read.fetch.ticket > ticket for read in self._reads.values())

    @property
    def descriptor(self) -> int | None:
        """The progress engine's notification handle."""
        return self._session.engine.descriptor

    def flush(self, timeout: float) -> None:
        """Turns the progress engine until every write is done."""
        deadline = time.monotonic() + timeout
        while self._backlog or self._writes.under_way:
            self._collect()
            if time.monotonic() >= deadline:
                raise TransportError(f"writes are still under way after {timeout} seconds")
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Waits a moment for the last writes, then takes everything down in the reverse order of its making."""
        if self._failure == "closed":
            return
        try:
            self.flush(FAREWELL_SECONDS)
        except TransportError as error:
            log.debug("the last writes did not get out", extra={"fields": {"reason": str(error)}})
        self._failure = "closed"
        self._session.close()

    @property
    def _busy(self) -> bool:
        return bool(self._reads) or self._writes.under_way > 0

    def _note_start(self) -> None:
        if not self._busy:
            self._moved = time.monotonic()

    def _send(self) -> None:
        self._note_start()
        while self._backlog and self._writes.free:
            try:
                self._writes.write(*self._backlog.popleft())
            except DocaError as error:
                self._fail(str(error))

    def _collect(self) -> None:
        """Takes what is done; new tasks for what waited."""
        self._check()
        if self._busy or self._session.engine.armed:
            self._session.engine.drain()
            self._settle()
            self._arm()
            if self._busy and time.monotonic() - self._moved > STUCK_SECONDS:
                self._fail("the device has not done its work")
        elif self._session.lost:
            self._fail(self._session.lost)

    def _settle(self) -> None:
        done = self._session.done
        if done:
            self._moved = time.monotonic()
        while done:
            number, status = done.popleft()
            if not self._writes.done(number):
                self._land(number, status)
            if status:
                self._fail(f"a task failed with {self._session.library.status_name(status)}")
        if self._session.lost:
            self._fail(self._session.lost)
        self._send()

    def _land(self, number: int, status: int) -> None:
        read = self._reads.pop(number)
        fetch = read.fetch
        fetch.under_way -= 1
        if status == Status.SUCCESS:
            fetch.landed.append((read.part, read.at, read.part.pool.landed(number, read.size)))
        read.part.pool.done(number)
        if fetch.under_way:
            return
        for part, at, content in fetch.landed:
            part.copy[at : at + len(content)] = content

    def _arm(self) -> None:
        """The descriptor tells of reads; nobody waits for writes."""
        while self._reads and not self._session.engine.arm():
            self._settle()

    def _check(self) -> None:
        if self._failure:
            raise TransportError(f"the connection to the arena is gone: {self._failure}")

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._check()

    def _within_inbound(self, offset: int, size: int) -> int:
        at = offset - self._inbound_offset
        if at < 0 or at + size > self._writes.place.size:
            raise TransportError(f"{size} bytes at {offset} are not in this front end's part of the inbound region")
        return at

    def _part(self, offset: int, size: int) -> _Part:
        if offset % WORD or size % WORD or size < 0:
            raise TransportError(f"{size} bytes at {offset} are not whole words")
        part = next((part for part in self._parts if part.holds(offset, size)), None)
        if part is None:
            raise TransportError(f"{size} bytes at {offset} are not in this front end's parts of the outbound region")
        return part

    def _pieces(self, one: Range) -> list[tuple[_Part, int, int]]:
        part = self._part(*one)
        at, unit = one.offset - part.offset, part.pool.unit
        return [(part, at + start, min(unit, one.size - start)) for start in range(0, one.size, unit)]

    def _lacks_room(self, wanted: list[tuple[_Part, int, int]]) -> bool:
        return any(sum(part is one for one, _, _ in wanted) > part.pool.free for part in self._parts)
