"""The scheduler must cost microseconds: it runs between any two steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.scheduler_step import step_times


@pytest.mark.parametrize(("sequences", "most"), [(64, 20.0), (256, 80.0)])
def test_a_step_takes_microseconds(sequences: int, most: float) -> None:
    """The median of hundreds of steps; the best of three runs, since other work may share the cores."""
    assert min(float(np.median(step_times(sequences))) for _ in range(3)) < most
