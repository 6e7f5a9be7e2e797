"""The front end's own memory that the RDMA device may touch: what is to be written, and where what was read lands."""

from __future__ import annotations

import mmap
from collections import deque

import numpy as np

from blink_proto.rdma.binding import Access, Domain


class PinnedMemory:
    """Registered anonymous memory; peers have no right to it."""

    def __init__(self, domain: Domain, size: int) -> None:
        self._mapped = mmap.mmap(-1, size)
        self.bytes = np.frombuffer(self._mapped, np.uint8)
        self.view = memoryview(self._mapped)
        self.address = int(self.bytes.ctypes.data)
        self._region = domain.register(self.address, size, Access.LOCAL_WRITE)
        self.key = self._region.local_key

    def close(self) -> None:
        """Gives it back to the system as soon as nobody looks at it."""
        self._region.close()


class Staging:
    """A ring of bytes that wait to be sent: given out in order, and given back in the same order.

    Args:
        start: of the ring in the pinned memory.
        size: of the ring.
    """

    def __init__(self, start: int, size: int) -> None:
        self._start, self.size = start, size
        self._head = 0
        self._spans: deque[tuple[int, int]] = deque()
        """(position of the head before it, position behind it) of what is given out, positions without wrap."""

    def take(self, size: int) -> int | None:
        """Offset of so many bytes in the pinned memory, in one piece, or None while there is no room."""
        if not self._spans:
            self._head = 0  # an empty ring has all its room in one piece
        at = self._head
        if at % self.size + size > self.size:  # does not fit before the end of the ring
            at += self.size - at % self.size
        tail = self._spans[0][0] if self._spans else self._head
        if at + size - tail > self.size or size > self.size:
            return None
        self._spans.append((self._head, at + size))
        self._head = at + size
        return self._start + at % self.size

    def take_back(self, count: int) -> None:
        """The last `count` takes were in vain."""
        for _ in range(count):
            self._head = self._spans.pop()[0]

    def give_back(self, count: int) -> None:
        """The first `count` takes are not needed any more."""
        for _ in range(count):
            self._spans.popleft()
