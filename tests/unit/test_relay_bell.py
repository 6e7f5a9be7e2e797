"""When the relay looks at host memory: at a ring, after a while without one, and again while there is more."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blink_proto import arena
from gpu_runtime.scheduler import host
from tests.bench.arena_memory import Memory, make_config
from tests.emulation.build import build_emulated

MS = 1_000_000
SUBMISSIONS = 40


class Relayed:
    """A scheduler with a device's arena of its own, a front end's memory, and the relay between them."""

    def __init__(self, library: Path) -> None:
        config = make_config(
            submit_slots=64, heap_tokens=1 << 18, log_slots=64, max_sequences=4, max_running=4, lease_timeout_ns=10**15
        )
        self.memory = Memory(config)
        self._scheduler = host.HostScheduler(config, self.memory.inbound, self.memory.outbound)
        self._calls = ctypes.CDLL(str(library))
        self._calls.blink_relay_pull.argtypes = self._calls.blink_relay_step.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint64,
        ]

    def ring(self) -> None:
        self.memory.inbound[:8].view(np.uint64)[0] += 1

    def pull(self, now: int) -> bool:
        """Whether the idle poll would wait after it."""
        return bool(self._calls.blink_relay_pull(self._scheduler._handle, now))

    def step(self, now: int) -> None:
        self._calls.blink_relay_step(self._scheduler._handle, now)

    @property
    def taken(self) -> int:
        return int(self.memory.out[0]["submit_read"])

    @property
    def lease(self) -> int:
        return int(self.memory.out[0]["lease"])

    def ask_lease(self) -> None:
        self.memory.control[0]["heartbeat"] = 1
        self.memory.control[0]["lease"] = 1

    def submit(self, count: int, **fields: int) -> None:
        for record in self.memory.submit[0][:count]:
            record["prompt_tokens"], record["max_tokens"], record["top_p"] = 2, 2, 1.0
            for name, value in fields.items():
                record[name] = value
            record["commit"] = arena.pack_commit_word(1, 1)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_emulated("relay.cpp", tmp_path_factory.mktemp("bell"))


@pytest.fixture
def relayed(library: Path) -> Iterator[Relayed]:
    host.use_library(library)
    yield Relayed(library)
    host.use_library(None)


def test_without_a_ring_it_looks_every_50_ms(relayed: Relayed) -> None:
    relayed.ask_lease()
    assert relayed.pull(49 * MS)
    relayed.step(1)
    assert relayed.lease == 0
    assert relayed.pull(50 * MS)
    relayed.step(2)
    assert relayed.lease == 1


def test_it_looks_at_a_ring(relayed: Relayed) -> None:
    relayed.ask_lease()
    relayed.ring()
    assert relayed.pull(1)
    relayed.step(1)
    assert relayed.lease == 1


def live(relayed: Relayed) -> None:
    relayed.ask_lease()
    relayed.ring()
    relayed.pull(1)
    relayed.step(1)


def test_refused_ones_beyond_32_are_taken_without_another_ring(relayed: Relayed) -> None:
    live(relayed)
    relayed.submit(SUBMISSIONS, max_tokens=0)
    relayed.ring()
    assert not relayed.pull(2)  # there is more: no rest
    relayed.step(2)
    assert relayed.taken == 32
    assert relayed.pull(3)
    relayed.step(3)
    assert relayed.taken == SUBMISSIONS


def test_ones_that_cannot_be_taken_do_not_keep_it_awake(relayed: Relayed) -> None:
    live(relayed)
    relayed.submit(SUBMISSIONS)
    relayed.ring()
    assert not relayed.pull(2)
    relayed.step(2)
    assert relayed.taken == 4  # rows of the sequence table
    assert not relayed.pull(3)  # four places further
    assert relayed.pull(4)
    relayed.step(4)


def test_what_will_be_refused_is_not_copied(relayed: Relayed) -> None:
    """All 32 prompts of 2^18 tokens would be more than a pull copies."""
    live(relayed)
    relayed.submit(SUBMISSIONS, prompt_tokens=1 << 18, max_tokens=1)  # over the window: no token is looked at
    relayed.ring()
    assert not relayed.pull(2)
    relayed.step(2)
    assert relayed.taken == 32
    reasons = arena.unpack_token_body(relayed.memory.log[0]["body"][:32])[1]
    assert set(reasons.tolist()) == {int(arena.ErrorCode.CONTEXT_LENGTH)}
