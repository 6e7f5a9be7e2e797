"""When to look for news again: steps of the device are about as long as the one before."""

from __future__ import annotations

SHORTEST_WAIT = 0.00025
COARSE_WAIT = 0.001
LONGEST_WAIT = 0.005
WAIT_SHARE = 1 / 32
"""However long steps are, a poll adds no more than this share to the time of one, or COARSE_WAIT."""
SHORT_STEP = 0.004
"""Of steps up to here, coarse polls catch several at once: less work, for what no reader sees."""
SAME_STEP = 0.0015
"""News that come so soon after others belong to the same step."""


class Rhythm:
    """Few polls in the middle of a step, and more about the time when it should end. Times in seconds."""

    def __init__(self) -> None:
        self._latest = 0.0
        self._step = 0.0

    def start(self, now: float) -> None:
        """Something was asked for."""
        self._latest = now

    def news(self, now: float) -> None:
        """A poll has brought some."""
        gap = now - self._latest
        if gap > SAME_STEP:
            self._step, self._latest = gap, now

    def wait(self, now: float) -> float:
        """Until the next poll."""
        since = now - self._latest
        coarse = min(max(since * WAIT_SHARE, COARSE_WAIT), LONGEST_WAIT)
        if self._step < SHORT_STEP:
            return coarse
        return min(max(abs(self._step - since) / 2, SHORTEST_WAIT), coarse)
