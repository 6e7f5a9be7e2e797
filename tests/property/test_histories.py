"""Random histories: the core comes to the same plans and records as the twin, and the invariants hold.

BLINK_HISTORIES sets how many short histories run (default 3000); seeds are fixed, so a failure names its history.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.histories import HOSTILE, LONG, MIXED, MIXES, POLITE, draw_action, draw_history, draw_limits
from tests.property.world import World

HISTORIES = int(os.environ.get("BLINK_HISTORIES", "3000"))
BATCHES = 10


def run_history(seed: int) -> None:
    """One short history under tiny limits, to its end."""
    rng = Random(seed)
    world = World(draw_limits(rng.randint))
    mix = MIXES[seed % len(MIXES)]
    for action in draw_history(rng.randint, world.limits, rng.randint(10, 120), mix):
        world.apply(action)
    world.finish()


@pytest.mark.parametrize("batch", range(BATCHES))
def test_core_and_twin_agree_in_short_histories(batch: int) -> None:
    for seed in range(batch, HISTORIES, BATCHES):
        try:
            run_history(seed)
        except Exception as error:
            error.add_note(f"history: run_history({seed})")
            raise


@pytest.mark.parametrize("mix", [POLITE, MIXED, HOSTILE], ids=["polite", "mixed", "hostile"])
def test_core_and_twin_agree_in_a_long_history(mix: dict[str, int]) -> None:
    rng = Random(17)
    world = World(LONG)
    busy = mix | {"submit": 3 * mix["submit"]}
    for action in draw_history(rng.randint, LONG, max(2000, HISTORIES * 2), busy):
        world.apply(action)
    assert world.outbound.telemetry("steps") > 100
    world.finish()


@settings(
    max_examples=max(20, HISTORIES // 20),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_core_and_twin_agree_in_shrinkable_histories(data: Any) -> None:
    """Fewer, but a failure is shown as a short list of actions."""

    def draw(low: int, high: int) -> int:
        return int(data.draw(st.integers(low, high)))

    limits = draw_limits(draw)
    world = World(limits)
    leases = draw_history(draw, limits, 0, MIXED)
    more = data.draw(st.lists(st.builds(lambda: draw_action(draw, MIXED, limits.channels)), max_size=40))
    for action in leases + more:
        world.apply(action)
    world.finish()
