"""The core's poll: an idle chain sleeps, and wakes for whatever a step could do."""

from __future__ import annotations

import threading
import time
from random import Random

import numpy as np

from gpu_runtime.scheduler.layout import Command
from tests.property.histories import MIXES, draw_history, draw_limits
from tests.property.limits import Limits
from tests.property.world import World

MILLISECOND = 1_000_000


def leased(limits: Limits) -> World:
    """A world whose first channel is live, and idle."""
    world = World(limits, check_polls=True)
    world.workers[0].ask()
    world.step(Random(0))
    return world


def test_an_idle_poll_lasts_as_long_as_it_may() -> None:
    world = leased(Limits())
    began = time.monotonic()
    assert not world.core.poll(30 * MILLISECOND)
    assert time.monotonic() - began >= 0.03


def test_a_submission_wakes_a_poll() -> None:
    world = leased(Limits())
    worker = world.workers[0]
    record = worker.good_record(Random(0), long=False)
    timer = threading.Timer(0.05, lambda: worker.submit(record))
    timer.start()
    began = time.monotonic()
    assert world.core.poll(10_000 * MILLISECOND)
    assert time.monotonic() - began < 5
    timer.join()


def test_a_command_wakes_a_poll() -> None:
    world = leased(Limits())
    word = np.zeros(1, np.uint64)
    timer = threading.Timer(0.05, lambda: word.__setitem__(0, int(Command.DRAIN)))
    timer.start()
    began = time.monotonic()
    world.core.poll(10_000 * MILLISECOND, word, int(Command.RUN))
    assert time.monotonic() - began < 5
    timer.join()


def test_no_news_is_missed_in_random_histories() -> None:
    for seed in range(600):
        rng = Random(seed)
        world = World(draw_limits(rng.randint), check_polls=True)
        mix = MIXES[seed % len(MIXES)]
        try:
            for action in draw_history(rng.randint, world.limits, 80, mix):
                world.apply(action)
            world.finish()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_what_cannot_be_taken_does_not_keep_the_chain_awake() -> None:
    """A log that nobody reads stops its sequences and holds its submissions back; the chain must sleep meanwhile."""
    world = leased(Limits(log_slots=1, eos_tokens=(), channels=1))
    worker = world.workers[0]
    for seed in range(12):
        worker.submit(worker.good_record(Random(seed), long=True))
        world.step(Random(seed), faults=False)
    assert world.core.plan().tokens == 0
    world.step(Random(0), faults=False)
    assert worker.submit_position > worker.out("submit_read")
    assert not world.core.poll(MILLISECOND)
