"""The bytes of request bodies that a worker holds at once: a bound on what clients can make it remember."""

from __future__ import annotations

WHOLE_BODIES = 16
"""Room for so many bodies of the largest size, or for more smaller ones."""


class BodyRoom:
    """Room for bodies.

    Args:
        most_bytes: all together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes

    def take(self, size: int) -> bool:
        """Whether there was room for so much; it is then taken."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """What was taken is free again."""
        self._left += size
