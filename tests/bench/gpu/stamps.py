"""What the stamps of a chain's steps say: how long a kind of step takes, and where the time goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepTimes:
    """Seconds. `step` is from the begin of a step to the begin of the next one.

    `scheduler` and `between` are means of the middle half: the device's clock moves in steps of up to a microsecond, of
    which a median would be a multiple.
    """

    count: int
    step_p50: float
    step_p99: float
    scheduler: float
    between: float


def decode_steps(stamps: NDArray[np.void], sequences: int) -> StepTimes | None:
    """Of steps in which so many sequences decode and nothing else happens; None where there are none."""
    first, second = stamps[:-1], stamps[1:]
    neighbours = second["step"] == first["step"] + 1
    return _times(first, second, _is_decode(first, sequences) & _is_decode(second, sequences) & neighbours)


def prefill_steps(stamps: NDArray[np.void], tokens: int) -> NDArray[np.float64]:
    """Seconds, begin to end of the scheduler, of each step that computes so many prompt tokens and nothing else."""
    wanted = stamps[(stamps["tokens"] == tokens) & (stamps["decode_works"] == 0)]
    return (wanted["tail_end_ns"] - wanted["begin_ns"]) / 1e9


def after(stamps: NDArray[np.void], step: int) -> NDArray[np.void]:
    """Those of later steps."""
    return stamps[stamps["step"] > step]


def last_step(stamps: NDArray[np.void]) -> int:
    """Number of the latest step; 0 when there was none."""
    return int(stamps["step"].max()) if len(stamps) else 0


def middle_mean(values: NDArray[np.float64]) -> float:
    """Mean of the middle half of the values."""
    ordered = np.sort(values)
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


def _is_decode(steps: NDArray[np.void], sequences: int) -> NDArray[np.bool_]:
    return (steps["tokens"] == sequences) & (steps["decode_works"] == sequences)


def _times(first: NDArray[np.void], second: NDArray[np.void], wanted: NDArray[np.bool_]) -> StepTimes | None:
    first, second = first[wanted], second[wanted]
    if not len(first):
        return None
    steps = _seconds(first["begin_ns"], second["begin_ns"])
    p50, p99 = np.percentile(steps, (50, 99))
    scheduler = middle_mean(_seconds(first["tail_begin_ns"], first["tail_end_ns"]))
    between = middle_mean(_seconds(first["tail_end_ns"], second["begin_ns"]))
    return StepTimes(len(first), float(p50), float(p99), scheduler, between)


def _seconds(begin: NDArray[np.uint64], end: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (end.astype(np.int64) - begin.astype(np.int64)) / 1e9
