"""When the pump looks for news, and its sleeps."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import uvloop

from dpu_service.sequences.alarm import Alarm
from dpu_service.sequences.rhythm import COARSE_WAIT, LONGEST_WAIT, SHORTEST_WAIT, WAIT_SHARE, Rhythm


def follow(steps: list[float]) -> tuple[list[float], int]:
    """How long the news of each step waited for a poll, and the polls, when sleeps take what they should."""
    rhythm, now, polls, waited = Rhythm(), 100.0, 0, []
    rhythm.start(now)
    for step in steps:
        due = now + step
        while now < due:
            wait = rhythm.wait(now)
            assert SHORTEST_WAIT <= wait <= LONGEST_WAIT
            now += wait
            polls += 1
        waited.append(now - due)
        rhythm.news(now)
    return waited, polls


@pytest.mark.parametrize("step", [0.0005, 0.002, 0.005, 0.0201, 0.05, 0.3])
def test_even_steps(step: float) -> None:
    waited, polls = follow([step] * 50)
    usual = sorted(waited)[25]
    assert usual <= (COARSE_WAIT if step < 0.004 else 2 * SHORTEST_WAIT)
    assert polls / 50 <= max(1 + step / COARSE_WAIT, 30 * step / 0.02)


def test_steps_of_any_length_wait_a_bounded_share() -> None:
    draw = random.Random(5)
    steps = [draw.choice([0.0003, 0.004, 0.02, 0.11, 0.7]) * draw.uniform(0.5, 1.5) for _ in range(500)]
    waited, _ = follow(steps)
    for delay, step in zip(waited, steps, strict=True):
        assert delay <= max(COARSE_WAIT, (step + delay) * WAIT_SHARE)


def test_one_step_that_is_seen_in_pieces_is_one_step() -> None:
    rhythm = Rhythm()
    rhythm.start(0.0)
    for at in (0.02, 0.0204, 0.0208, 0.04, 0.0404):
        rhythm.news(at)
    assert rhythm.wait(0.04 + 0.0199) == SHORTEST_WAIT
    assert rhythm.wait(0.04 + 0.0101) > COARSE_WAIT - 1e-9


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_an_alarm_rings_in_time(run: object) -> None:
    async def main() -> list[float]:
        over = []
        with Alarm() as first, Alarm() as second:
            for seconds in (0.0001, 0.0003, 0.002, 0.011) * 5:
                begin = time.monotonic()
                await asyncio.gather(first.sleep(seconds), second.sleep(seconds / 2))
                over.append(time.monotonic() - begin - seconds)
        return over

    over: list[float] = run(main())  # type: ignore[operator]
    assert min(over) >= 0
    assert sorted(over)[len(over) // 4] < 0.0009, "finer than a millisecond, on a busy machine too"
