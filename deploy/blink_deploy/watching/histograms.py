"""Latencies from the front end's histograms: what came between two scrapes, and its quantiles."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

FIRST_TOKEN, PER_TOKEN = "blink_time_to_first_token_seconds", "blink_time_per_output_token_seconds"
QUEUED = "blink_sequences_queued"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]+)"')

Counts = Mapping[float, float]
"""Of a histogram: how many values were at most as large as each bound; the last bound is infinite."""


@dataclass(frozen=True)
class Scrape:
    """What is taken from one answer. `queued`: None where the front end does not say."""

    first_token: Counts = field(default_factory=dict)
    per_token: Counts = field(default_factory=dict)
    queued: float | None = None


def parse(text: str) -> Scrape:
    """Reads Prometheus' text format; series that differ in other labels are added up.

    Raises:
        ValueError: a value is no number.
    """
    counts: dict[str, dict[float, float]] = {FIRST_TOKEN: {}, PER_TOKEN: {}}
    queued: float | None = None
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, value = found[1], float(found[3])
        bound = _BOUND.search(found[2] or "")
        if bound and name.removesuffix("_bucket") in counts:
            buckets = counts[name.removesuffix("_bucket")]
            buckets[float(bound[1])] = buckets.get(float(bound[1]), 0.0) + value
        elif name == QUEUED:
            queued = (queued or 0.0) + value
    return Scrape(_ordered(counts[FIRST_TOKEN]), _ordered(counts[PER_TOKEN]), queued)


def _ordered(counts: Mapping[float, float]) -> Counts:
    return dict(sorted(counts.items()))


def between(earlier: Counts, later: Counts) -> Counts:
    """What was counted from one scrape to another; all of the later one where counting began anew."""
    difference = {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}
    return later if any(count < 0 for count in difference.values()) else difference


def quantile(counts: Counts, share: float) -> float | None:
    """The value below which a share of all lies, taken as evenly spread within its bucket, as Prometheus does. None
    without values; beyond the last finite bound, that bound.
    """
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    wanted = share * total
    finite = [(0.0, 0.0), *((bound, count) for bound, count in counts.items() if bound != float("inf"))]
    for (low, below), (high, within) in pairwise(finite):
        if within >= wanted and within > below:
            return low + (high - low) * (wanted - below) / (within - below)
    return finite[-1][0]


@dataclass(frozen=True)
class Latency:
    """Seconds; None without values."""

    p50: float | None = None
    p99: float | None = None


class Window:
    """The latest scrapes, so that quantiles are of the last so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: deque[tuple[float, Scrape]] = deque()

    def add(self, now: float, scrape: Scrape) -> None:
        """A new one; those that are older than the window go, but for the one that it begins with."""
        self._kept.append((now, scrape))
        while len(self._kept) > 2 and self._kept[1][0] <= now - self._seconds:
            self._kept.popleft()

    def first_token(self) -> Latency:
        """From a request's arrival to its first token."""
        return _latency(self._kept[0][1].first_token, self._kept[-1][1].first_token) if self._kept else Latency()

    def per_token(self) -> Latency:
        """Of each choice, the mean of the tokens after its first."""
        return _latency(self._kept[0][1].per_token, self._kept[-1][1].per_token) if self._kept else Latency()

    def queued(self) -> float | None:
        """Sequences without KV blocks, by the latest scrape."""
        return self._kept[-1][1].queued if self._kept else None


def _latency(earlier: Counts, later: Counts) -> Latency:
    counts = between(earlier, later)
    return Latency(quantile(counts, 0.5), quantile(counts, 0.99))
