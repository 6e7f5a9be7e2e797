"""A histogram for values that come by the ten thousand a second."""

from __future__ import annotations

import numpy as np
from prometheus_client import Histogram


class Tally:
    """Counts in plain memory, and adds to the real histogram in `flush`: `Histogram.observe` writes to shared files
    each time, which takes longer than to make a token's text.

    prometheus-client has no way to add several observations at once, so this knows how its histograms keep theirs.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._bounds = np.array(histogram._upper_bounds)
        self._histogram = histogram
        self._values: list[float] = []
        self.add_one = self._values.append
        """As one observation of a value."""

    def add(self, value: float, times: int = 1) -> None:
        """As so many observations of a value."""
        self._values += [value] * times

    def flush(self) -> None:
        """Shows what was added since the last call to whoever scrapes."""
        values = self._values
        places = np.searchsorted(self._bounds, values, side="left")
        for place, count in enumerate(np.bincount(places, minlength=len(self._bounds)).tolist()):
            if count:
                self._histogram._buckets[place].inc(count)
        self._histogram._sum.inc(sum(values))
        values.clear()
