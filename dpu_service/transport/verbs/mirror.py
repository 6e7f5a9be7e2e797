"""The local copy of the outbound region, brought up to date by reads of parts of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from blink_proto.rdma.binding import Read
from dpu_service.transport.base import Range
from dpu_service.transport.verbs.memory import PinnedMemory
from dpu_service.transport.verbs.sender import Batch, Sender
from dpu_service.transport.verbs.windows import Windows

SLOTS = 4
"""Fetches under way at once."""
SLOT_BYTES = 80 << 10
"""Of the cursors and the longest look ahead into a token log."""


@dataclass
class _Slot:
    start: int
    ranges: list[Range] = field(default_factory=list)
    ticket: int = 0


class Mirror:
    """What is read lands in a slot of its own and is copied as a whole once all of it has come. So nothing changes
    under a reader, and a fetch that was asked for later never shows anything older.

    Args:
        memory: pinned, from `start` on SLOTS · SLOT_BYTES bytes of it are for slots.
        region_bytes: size of the outbound region.
    """

    def __init__(self, sender: Sender, memory: PinnedMemory, start: int, windows: Windows, region_bytes: int) -> None:
        self._sender = sender
        self._memory = memory
        self._windows = windows
        self._copy = np.zeros(region_bytes, np.uint8)
        self._view = memoryview(self._copy)  # type: ignore[arg-type]
        self._free = [_Slot(start + i * SLOT_BYTES) for i in range(SLOTS)]
        self._asked = 0
        self._done = 0

    @property
    def awaited(self) -> bool:
        """Whether something is under way."""
        return len(self._free) < SLOTS

    def read(self, offset: int, size: int) -> bytes:
        """See `Transport.read`."""
        self._windows.find(offset, size, aligned=True)
        return self._view[offset : offset + size].tobytes()

    def fetch(self, ranges: tuple[Range, ...]) -> int:
        """See `Transport.fetch`."""
        if not ranges:
            return self._asked
        if not self._free:
            return self._asked + 1
        slot = self._free.pop()
        self._asked += 1
        slot.ticket, slot.ranges = self._asked, []
        reads, at = [], slot.start
        for wanted in ranges:
            remote, key = self._windows.find(wanted.offset, wanted.size, aligned=True)
            size = min(wanted.size, slot.start + SLOT_BYTES - at)
            if size == 0:
                break
            reads.append(Read(self._memory.address + at, self._memory.key, size, remote, key))
            slot.ranges.append(Range(wanted.offset, size))
            at += size
        self._sender.send(Batch(reads=reads, on_done=lambda: self._land(slot)))
        return slot.ticket

    def fetched(self, ticket: int) -> bool:
        """See `Transport.fetched`."""
        return self._done >= ticket

    def _land(self, slot: _Slot) -> None:
        at = slot.start
        for offset, size in slot.ranges:
            self._copy[offset : offset + size] = self._memory.bytes[at : at + size]
            at += size
        self._done = slot.ticket
        self._free.append(slot)
