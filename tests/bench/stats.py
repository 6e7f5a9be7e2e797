"""Turns records into the figures of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.bench.record import Record


def percentile(values: Sequence[float], percent: float) -> float:
    """Value below which `percent` of the values lie, linear between neighbours (Hyndman and Fan's type 7).

    Raises:
        ValueError: no values, or `percent` outside 0..100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError("a percentile needs values and a percentage from 0 to 100")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Distribution:
    """Seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None where there are no values."""
        known = sorted(values)
        if not known:
            return None
        p50, p90, p99 = (percentile(known, percent) for percent in (50, 90, 99))
        return cls(len(known), sum(known) / len(known), p50, p90, p99, known[-1])


@dataclass(frozen=True)
class Slo:
    """What makes a request good, in seconds; None asks nothing."""

    ttft: float | None = None
    tpot: float | None = None

    def met_by(self, record: Record) -> bool:
        """Whether a request succeeded within the objectives. A single token has no time per token to miss."""
        if not record.ok:
            return False
        if self.ttft is not None and (record.ttft is None or record.ttft > self.ttft):
            return False
        return self.tpot is None or record.tpot is None or record.tpot <= self.tpot


@dataclass(frozen=True)
class Goodput:
    """Requests that met the objectives: share of all (failures included) and rates a second."""

    share: float
    requests_per_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Summary:
    """One run. Rates are over `seconds`, from the start of the run to the last answer.

    Distributions cover successful requests. `lag` is how late requests were sent: the generator's own delay, which
    latencies include.
    """

    requests: int
    succeeded: int
    errors: dict[str, int]
    seconds: float
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    tokens_counted_by: str
    ttft: Distribution | None
    tpot: Distribution | None
    gap: Distribution | None
    latency: Distribution | None
    lag: Distribution | None
    goodput: Goodput | None


def summarise(records: Sequence[Record], start: float, slo: Slo | None = None) -> Summary:
    """Figures of one run that began at `start`."""
    good = [record for record in records if record.ok]
    seconds = max((record.end for record in records), default=start) - start
    tokens = sum(record.output_tokens for record in good)
    return Summary(
        requests=len(records),
        succeeded=len(good),
        errors=dict(Counter(record.error for record in records if not record.ok).most_common()),
        seconds=seconds,
        requests_per_s=_rate(len(good), seconds),
        prompt_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=tokens,
        output_tokens_per_s=_rate(tokens, seconds),
        tokens_counted_by="usage" if good and all(record.tokens_counted for record in good) else "chunks",
        ttft=Distribution.of(record.ttft for record in good if record.ttft is not None),
        tpot=Distribution.of(record.tpot for record in good if record.tpot is not None),
        gap=Distribution.of(gap for record in good for gap in record.gaps),
        latency=Distribution.of(record.latency for record in good),
        lag=Distribution.of(record.sent - record.due for record in records),
        goodput=_goodput(records, seconds, slo) if slo else None,
    )


def _goodput(records: Sequence[Record], seconds: float, slo: Slo) -> Goodput:
    met = [record for record in records if slo.met_by(record)]
    return Goodput(
        share=len(met) / len(records) if records else 0.0,
        requests_per_s=_rate(len(met), seconds),
        tokens_per_s=_rate(sum(record.output_tokens for record in met), seconds),
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
