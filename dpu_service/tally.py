"""A histogram for values that come by the ten thousand a second."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Histogram


class Tally:
    """Counts in plain memory, and adds to the real histogram in `flush`: `Histogram.observe` writes to shared files
    each time, which takes longer than to make a token's text.

    prometheus-client has no way to add several observations at once, so this knows how its histograms keep theirs.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._bounds: list[float] = histogram._upper_bounds
        self._histogram = histogram
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """As so many observations of a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def flush(self) -> None:
        """Shows what was added since the last call to whoever scrapes."""
        for place, count in enumerate(self._counts):
            if count:
                self._histogram._buckets[place].inc(count)
                self._counts[place] = 0
        self._histogram._sum.inc(self._sum)
        self._sum = 0.0
