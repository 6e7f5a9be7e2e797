"""A token bucket that several workers empty and each sees for itself."""

from __future__ import annotations

SECONDS = 60.0


class Bucket:
    """Holds one minute's worth, fills evenly, and is emptied by what the workers have charged in sum.

    The sum is all that workers share: each keeps a level of its own. Looked at once a second these levels differ by no
    more than a second's worth.

    Args:
        per_minute: its size.
        left: what is in it at the beginning.
        charged: the sum at the beginning.
        now: seconds of the monotonic clock.
    """

    def __init__(self, per_minute: int, left: int, charged: int, now: float) -> None:
        self.size = per_minute
        self._level = float(min(left, per_minute))
        self._charged = charged
        self._now = now

    def look(self, charged: int, now: float) -> float:
        """What is left; below 0 when answers took more than was foreseen."""
        filled = (now - self._now) * self.size / SECONDS
        self._level = min(float(self.size), self._level + filled - (charged - self._charged))
        self._charged, self._now = charged, now
        return self._level

    def resize(self, per_minute: int) -> None:
        """Another limit from now on; what is left is not more than before."""
        self._level = min(self._level, float(per_minute))
        self.size = per_minute

    def seconds_until(self, level: float) -> float:
        """As of the last look."""
        return max(0.0, (min(level, self.size) - self._level) * SECONDS / self.size)
