"""When the relay looks at host memory: at a ring, after a while without one, and again while there is more."""

from __future__ import annotations

from blink_proto import arena
from tests.emulation.relayed import Relayed, ask_lease, submit

MS = 1_000_000
SUBMISSIONS = 40


def test_without_a_ring_it_looks_every_50_ms(relayed: Relayed) -> None:
    ask_lease(relayed.memory)
    assert relayed.pull(49 * MS)
    relayed.step(1)
    assert relayed.lease == 0
    assert relayed.pull(50 * MS)
    relayed.step(2)
    assert relayed.lease == 1


def test_it_looks_at_a_ring(relayed: Relayed) -> None:
    ask_lease(relayed.memory)
    relayed.ring()
    assert relayed.pull(1)
    relayed.step(1)
    assert relayed.lease == 1


def live(relayed: Relayed) -> None:
    ask_lease(relayed.memory)
    relayed.ring()
    relayed.pull(1)
    relayed.step(1)


def test_refused_ones_beyond_32_are_taken_without_another_ring(relayed: Relayed) -> None:
    live(relayed)
    submit(relayed.memory, SUBMISSIONS, max_tokens=0)
    relayed.ring()
    assert not relayed.pull(2)  # there is more: no rest
    relayed.step(2)
    assert relayed.taken == 32
    assert relayed.pull(3)
    relayed.step(3)
    assert relayed.taken == SUBMISSIONS


def test_ones_that_cannot_be_taken_do_not_keep_it_awake(relayed: Relayed) -> None:
    live(relayed)
    submit(relayed.memory, SUBMISSIONS)
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
    submit(relayed.memory, SUBMISSIONS, prompt_tokens=1 << 18, max_tokens=1)  # over the window: no token is looked at
    relayed.ring()
    assert not relayed.pull(2)
    relayed.step(2)
    assert relayed.taken == 32
    reasons = arena.unpack_token_body(relayed.memory.log[0]["body"][:32])[1]
    assert set(reasons.tolist()) == {int(arena.ErrorCode.CONTEXT_LENGTH)}
