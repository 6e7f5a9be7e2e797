"""The queue pair's work in order: what does not fit yet waits here, and completions give room back."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from blink_proto.rdma.binding import INLINE_BYTES, QueuePair, RdmaError, Read, Write
from dpu_service.transport.base import STUCK_SECONDS, TransportError
from dpu_service.transport.verbs.memory import PinnedMemory, Staging

DEPTH = 256
"""Pieces of work on the queue pair at once."""
PIECE_BYTES = 256 << 10
"""Longer writes are cut."""
_WORD = struct.Struct("<Q")


@dataclass(slots=True)
class Payload:
    """Bytes that are to be written; PIECE_BYTES at most."""

    content: bytes = field(repr=False)
    remote: int = field(repr=False)
    remote_key: int = field(repr=False)


@dataclass(slots=True)
class Batch:
    """Work that is posted together: its last piece tells of its completion."""

    payloads: list[Payload] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    on_done: Callable[[], None] | None = None

    @property
    def pieces(self) -> int:
        """Work requests that it takes."""
        return len(self.payloads) + len(self.reads)


class Sender:
    """Posts batches in order.

    Args:
        pair: connected.
        memory: pinned.
        staging: the part of it that payloads go through.
    """

    def __init__(self, pair: QueuePair, memory: PinnedMemory, staging: Staging) -> None:
        self._pair = pair
        self._memory = memory
        self._staging = staging
        self._waiting: deque[Batch] = deque()
        self._posted: deque[tuple[int, Batch, int, float]] = deque()
        """(number, batch, pieces that went through staging, when)."""
        self._number = 0
        self._room = DEPTH
        self._failure: TransportError | None = None

    @property
    def idle(self) -> bool:
        """Everything has been done."""
        return not self._waiting and not self._posted

    def check(self) -> None:
        """Raises:
        TransportError: the connection has failed.
        """
        if self._failure is not None:
            raise TransportError(str(self._failure))

    def send_payloads(self, payloads: Iterable[Payload]) -> None:
        """As few batches as there may be: each has to fit on the queue pair, and into the staging ring when that is
        empty."""
        batch, size = Batch(), 0
        for payload in payloads:
            size += len(payload.content)
            if batch.pieces == DEPTH or size > self._staging.size:
                self.send(batch)
                batch, size = Batch(), len(payload.content)
            batch.payloads.append(payload)
        self.send(batch)

    def send(self, batch: Batch) -> None:
        """After everything that was sent before."""
        self.check()
        self._waiting.append(batch)
        self._post_waiting()

    def progress(self) -> None:
        """Takes completions.

        Raises:
            TransportError: one of them tells that the connection has failed.
        """
        self.check()
        try:
            done = self._pair.poll()
        except RdmaError as error:
            self._fail(str(error))
        for one in done:
            if one.fault:
                self._fail(f"a remote write or read failed: {one.fault}")
            self._retire(one.number)
        if done and self._waiting:
            self._post_waiting()
        if not done and self._posted and time.monotonic() - self._posted[0][3] > STUCK_SECONDS:
            self._fail("the device has not done its work")

    def _fail(self, reason: str) -> None:
        self._failure = TransportError(reason)
        raise self._failure

    def _retire(self, number: int) -> None:
        while self._posted and self._posted[0][0] <= number:
            _, batch, staged, _ = self._posted.popleft()
            self._room += batch.pieces
            self._staging.give_back(staged)
            if batch.on_done is not None:
                batch.on_done()

    def _post_waiting(self) -> None:
        while self._waiting and self._waiting[0].pieces <= self._room:
            batch = self._waiting[0]
            staged = self._stage(batch)
            if staged is None:
                return
            self._waiting.popleft()
            self._number += 1
            works, count = staged
            try:
                self._pair.post(works, self._number)
            except RdmaError as error:
                self._fail(str(error))
            self._posted.append((self._number, batch, count, time.monotonic()))
            self._room -= batch.pieces

    def _stage(self, batch: Batch) -> tuple[list[Write | Read], int] | None:
        """The batch as work, and how many takes of the staging ring it has; None while that has no room."""
        works: list[Write | Read] = []
        for i, payload in enumerate(batch.payloads):
            size = len(payload.content)
            at = self._staging.take(size)
            if at is None:
                self._staging.take_back(i)
                return None
            self._memory.view[at : at + size] = payload.content
            small = size <= INLINE_BYTES
            works.append(
                Write(self._memory.address + at, self._memory.key, size, payload.remote, payload.remote_key, small)
            )
        return [*works, *batch.reads], len(batch.payloads)


def word_payload(word: int, remote: int, key: int) -> Payload:
    """An 8-byte word."""
    return Payload(_WORD.pack(word), remote, key)
