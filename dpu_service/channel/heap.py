"""Allocator of the channel's prompt heap: first fit, neighbours joined when freed."""

from __future__ import annotations

from bisect import bisect_left


class PromptHeap:
    """Ranges of a heap of `size` tokens. Only book-keeping; it touches no memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]
        self._used: dict[int, int] = {}

    @property
    def used_tokens(self) -> int:
        """Tokens in allocated ranges."""
        return sum(self._used.values())

    def allocate(self, tokens: int) -> int | None:
        """Start of a range of `tokens` tokens, or None while there is no such hole.

        Raises:
            ValueError: `tokens` is not positive.
        """
        if tokens < 1:
            raise ValueError("a range holds at least one token")
        for i, (start, length) in enumerate(self._free):
            if length < tokens:
                continue
            if length == tokens:
                del self._free[i]
            else:
                self._free[i] = (start + tokens, length - tokens)
            self._used[start] = tokens
            return start
        return None

    def free(self, start: int) -> None:
        """Gives a range back.

        Raises:
            KeyError: no range starts there.
        """
        length = self._used.pop(start)
        at = bisect_left(self._free, (start, 0))
        if at < len(self._free) and self._free[at][0] == start + length:
            length += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == start:
            before, before_length = self._free.pop(at - 1)
            start, length, at = before, before_length + length, at - 1
        self._free.insert(at, (start, length))
