"""Fuzzers' bytes as choices: the same bytes are the same choices, and when there are none left all choices are 0."""

from __future__ import annotations


class Choices:
    """Takes choices from the front of some bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        """Whether there are bytes left."""
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """So many bytes, filled up with zeros."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken.ljust(count, b"\0")

    def below(self, limit: int) -> int:
        """A number from 0 to below a limit, of at most 2^64."""
        return int.from_bytes(self.take((limit.bit_length() + 7) // 8), "little") % limit
