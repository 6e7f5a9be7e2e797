"""Arrivals of the load generator have the properties of a Poisson process."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import pytest

from tests.bench.arrivals import poisson_arrivals, prompts


def test_gaps_are_exponential():
    rate, count = 4.0, 40_000
    due = list(islice(poisson_arrivals(rate, seed=1), count))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *due])]
    mean = sum(gaps) / count
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / count)
    # Mean and standard deviation of the exponential distribution are both 1/rate; 5 standard errors of each mean.
    assert mean == pytest.approx(1 / rate, abs=5 / rate / math.sqrt(count))
    assert deviation == pytest.approx(1 / rate, rel=0.05)
    # P(gap > t) = exp(-rate t): at t = 1/rate, 36.8 %.
    assert sum(gap > 1 / rate for gap in gaps) / count == pytest.approx(math.exp(-1), abs=0.015)


def test_counts_in_equal_windows_have_variance_equal_to_their_mean():
    due = islice(poisson_arrivals(5.0, seed=2), 50_000)
    counts = [0] * 9_000
    for moment in due:
        if moment < len(counts):
            counts[int(moment)] += 1
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert mean == pytest.approx(5.0, rel=0.05)
    assert variance / mean == pytest.approx(1.0, abs=0.1)


def test_seed_decides():
    first, again, other = (list(islice(poisson_arrivals(2.0, seed), 20)) for seed in (3, 3, 4))
    assert first == again != other
    assert first == sorted(first)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate: float):
    with pytest.raises(ValueError, match="rate"):
        next(poisson_arrivals(rate, seed=0))


def test_prompts_have_their_length_and_differ():
    texts = list(islice(prompts(16, seed=0), 50))
    assert all(len(text.split()) == 16 for text in texts)
    assert len(set(texts)) == 50
