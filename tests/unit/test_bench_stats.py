"""Figures of the load generator against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.record import Record
from tests.bench.stats import Distribution, Slo, percentile, summarise


def answered(due: float, chunks: list[float], tokens: int, end: float, sent: float | None = None) -> Record:
    return Record(
        due=due,
        sent=due if sent is None else sent,
        chunk_times=chunks,
        end=end,
        status=200,
        finish_reason="length",
        prompt_tokens=10,
        output_tokens=tokens,
        tokens_counted=True,
    )


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10.0), (25, 17.5), (50, 25.0), (90, 37.0), (99, 39.7), (100, 40.0)]
)
def test_percentile_is_linear_between_neighbours(percent: float, expected: float):
    assert percentile([40.0, 10.0, 30.0, 20.0], percent) == pytest.approx(expected)


def test_percentile_of_one_value_is_that_value():
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_no_answer(values: list[float], percent: float):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_distribution():
    assert Distribution.of([]) is None
    found = Distribution.of([3.0, 1.0, 2.0])
    assert found == Distribution(count=3, mean=2.0, p50=2.0, p90=pytest.approx(2.8), p99=pytest.approx(2.98), max=3.0)


def test_times_of_one_record():
    # Due at 10, first text at 12, three chunks that carried 5 tokens in all: 3 s over 4 tokens after the first.
    record = answered(due=10.0, chunks=[12.0, 13.0, 15.0], tokens=5, end=15.5)
    assert (record.ttft, record.tpot, record.latency) == (2.0, 0.75, 5.5)
    assert record.gaps == [1.0, 2.0]


def test_a_single_token_has_no_time_per_token():
    assert answered(due=0.0, chunks=[1.0], tokens=1, end=1.0).tpot is None


def test_a_whole_answer_has_no_token_times():
    record = answered(due=0.0, chunks=[], tokens=8, end=1.0)
    assert (record.ttft, record.tpot, record.gaps) == (None, None, [])


def test_summary_counts_rates_and_failures():
    records = [
        answered(due=100.0, chunks=[101.0, 102.0, 103.0], tokens=3, end=103.0),
        answered(due=101.0, chunks=[103.0, 103.5], tokens=2, end=104.0, sent=101.25),
        Record(due=102.0, sent=102.0, end=110.0, error="timeout", output_tokens=1, chunk_times=[103.0]),
        Record(due=103.0, sent=103.0, end=103.5, error="http_429"),
    ]
    summary = summarise(records, start=100.0)
    assert (summary.requests, summary.succeeded, summary.errors) == (4, 2, {"timeout": 1, "http_429": 1})
    assert summary.seconds == 10.0
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (0.2, 0.5)
    assert (summary.prompt_tokens, summary.output_tokens, summary.tokens_counted_by) == (20, 5, "usage")
    assert summary.ttft is not None
    assert (summary.ttft.count, summary.ttft.mean, summary.ttft.max) == (2, 1.5, 2.0)
    assert summary.tpot is not None
    assert (summary.tpot.mean, summary.tpot.p50) == (0.75, 0.75)
    assert summary.gap is not None
    assert (summary.gap.count, summary.gap.mean) == (3, pytest.approx(2.5 / 3))
    assert summary.lag is not None
    assert (summary.lag.count, summary.lag.max) == (4, 0.25)
    assert summary.goodput is None


def test_goodput_counts_what_met_every_objective():
    records = [
        answered(due=0.0, chunks=[0.2, 0.3], tokens=2, end=0.3),  # both met: TTFT 0.2, TPOT 0.1
        answered(due=0.0, chunks=[0.6, 0.7], tokens=2, end=0.7),  # late first token
        answered(due=0.0, chunks=[0.2, 0.9], tokens=2, end=0.9),  # slow tokens
        answered(due=0.0, chunks=[0.5], tokens=1, end=0.5),  # on the limit; one token has no TPOT
        Record(due=0.0, sent=0.0, end=2.0, error="cut"),
    ]
    goodput = summarise(records, start=0.0, slo=Slo(ttft=0.5, tpot=0.2)).goodput
    assert goodput is not None
    assert (goodput.share, goodput.requests_per_s, goodput.tokens_per_s) == (0.4, 1.0, 1.5)


def test_nothing_answered():
    summary = summarise([], start=5.0, slo=Slo(ttft=1.0))
    assert (summary.requests, summary.seconds, summary.output_tokens_per_s, summary.ttft) == (0, 0.0, 0.0, None)
    assert summary.goodput is not None
    assert summary.goodput.share == 0.0
