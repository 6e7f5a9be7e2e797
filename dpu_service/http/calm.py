"""A budget for what costs a server work and moves no request forward: resets, pings, settings, empty frames."""

from __future__ import annotations

import time

BURST = 400.0
PER_SECOND = 40.0
RESET_COST = 2.0
"""A stream that a client opens and resets costs a request each (CVE-2023-44487), hence 200 at once and 20/s."""


class Calm:
    """Fills by time and by useful frames.

    Args:
        now: seconds of the monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._left = BURST
        self._seen = now

    def earn(self, frames: float) -> None:
        """Useful work was done."""
        self._left = min(BURST, self._left + frames)

    def spend(self, cost: float) -> bool:
        """Whether the budget held."""
        now = time.monotonic()
        self._left = min(BURST, self._left + (now - self._seen) * PER_SECOND) - cost
        self._seen = now
        return self._left >= 0
