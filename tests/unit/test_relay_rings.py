"""A lease begins with empty rings and nothing of others, whichever way its front end and the one before it come."""

from __future__ import annotations

import numpy as np
import pytest

from blink_proto import arena
from tests.bench.arena_memory import Memory
from tests.emulation.relayed import Relayed, ask_lease, submit

WAYS = ("host", "card")
TOLD = ("lease", "live", "submit_read", "cancel_read", "protocol_errors")


def memory_of(relayed: Relayed, way: str) -> Memory:
    """Where a front end writes."""
    return relayed.memory if way == "host" else relayed.device


class Turns:
    """A pull, the scheduler and a push, again and again."""

    def __init__(self, relayed: Relayed) -> None:
        self.relayed, self.now = relayed, 0

    def take(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.now += 1
            self.relayed.ring()
            self.relayed.pull(self.now)
            self.relayed.step(self.now)

    def give(self, way: str) -> None:
        """As the control process does when it grants channel 0."""
        if way == "host" and self.relayed.direct_seen:
            for name in ("lease", "heartbeat", "log_read"):
                self.relayed.memory.control[0][name] = 0
        self.relayed.set_direct(int(way == "card"))
        self.take()


def plant(memory: Memory, lease: int) -> None:
    """Fills both rings of channel 0 for a lease."""
    submit(memory, len(memory.submit[0]), lease=lease, max_tokens=0)
    for cancel in memory.cancels[0]:
        cancel["commit"] = arena.pack_commit_word(1, lease)


def told(relayed: Relayed) -> list[int]:
    """What everybody sees of channel 0."""
    return [int(relayed.memory.out[0][name]) for name in TOLD]


@pytest.mark.parametrize("after", WAYS)
@pytest.mark.parametrize("before", WAYS)
def test_what_an_earlier_holder_left_is_not_taken(relayed: Relayed, before: str, after: str) -> None:
    turns = Turns(relayed)
    turns.give(before)
    ask_lease(memory_of(relayed, before))
    turns.take()
    for lease in (2, 3):
        plant(memory_of(relayed, before), lease)
        turns.give(after)
        ask_lease(memory_of(relayed, after), lease=lease)
        turns.take(4)
        assert told(relayed) == [lease, 1, 0, 0, 0]
        assert not relayed.device.submit[0]["commit"].any()
        assert not relayed.device.cancels[0]["commit"].any()
        turns.give(before)
    turns.give(after)
    ask_lease(memory_of(relayed, after), lease=4)
    turns.take()
    submit(memory_of(relayed, after), 1, lease=4, max_tokens=2)
    turns.take()
    assert told(relayed) == [4, 1, 1, 0, 0]
    assert int(relayed.device.submit[0][0]["max_tokens"]) == 2, "the one that was written where it lies"


@pytest.mark.parametrize("way", WAYS)
def test_records_that_come_before_their_lease_are_lost(relayed: Relayed, way: str) -> None:
    """They are not told from those of an earlier holder, and they do not come up later."""
    turns = Turns(relayed)
    turns.give(way)
    ask_lease(memory_of(relayed, way))
    plant(memory_of(relayed, way), 1)
    turns.take(4)
    assert told(relayed) == [1, 1, 0, 0, 0]
    submit(memory_of(relayed, way), 2, lease=1, max_tokens=0)
    turns.take()
    assert told(relayed) == [1, 1, 2, 0, 0]


def test_nothing_else_of_host_memory_is_changed(relayed: Relayed) -> None:
    """And of no other channel's rings anything at all."""
    turns = Turns(relayed)
    words = relayed.memory.inbound.view(np.uint64)
    words[:] = np.arange(words.size, dtype=np.uint64) + (1 << 40)
    for channel, control in enumerate(relayed.memory.control):
        control["lease"] = channel == 0
    before = words.copy()
    relayed.pull(turns.now)
    rings = (relayed.memory.submit[0]["commit"], relayed.memory.cancels[0]["commit"])
    assert not any(ring.any() for ring in rings)
    assert np.count_nonzero(words != before) == sum(ring.size for ring in rings)


@pytest.mark.parametrize("before", WAYS)
def test_a_front_end_over_rdma_finds_nothing_of_an_earlier_holder(relayed: Relayed, before: str) -> None:
    """No answers as soon as it may read, no prompts as soon as it may submit."""
    turns, memory, device = Turns(relayed), memory_of(relayed, before), relayed.device
    turns.give(before)
    ask_lease(memory)
    turns.take()
    memory.heap[0][:16] = 44
    submit(memory, 3, lease=1, prompt_tokens=16, max_tokens=2, cache_salt=5)
    turns.take(12)
    assert told(relayed)[:3] == [1, 1, 3]
    assert (device.heap[0][:16] == 44).all()
    assert np.count_nonzero(device.log[0]["head"]) == 6
    memory.control[0]["lease"] = 0
    turns.take()
    assert told(relayed)[:2] == [1, 0]
    assert not device.log[0].view(np.uint64).any()
    turns.give("card")
    ask_lease(device, lease=2)
    turns.take()
    assert told(relayed)[:3] == [2, 1, 3]
    assert not any(part[0].view(np.uint32).any() for part in (device.submit, device.cancels, device.heap))
    assert not device.log[0].view(np.uint64).any()


def test_nothing_of_a_front_end_over_rdma_comes_to_host_memory(relayed: Relayed) -> None:
    """Which is not wiped."""
    turns, device = Turns(relayed), relayed.device
    turns.give("card")
    ask_lease(device)
    turns.take()
    device.heap[0][:16] = 44
    submit(device, 3, lease=1, prompt_tokens=16, max_tokens=2, cache_salt=5)
    turns.take(12)
    turns.give("host")
    ask_lease(relayed.memory, lease=2)
    turns.take(2)
    assert told(relayed)[:3] == [2, 1, 3]
    assert not relayed.memory.log[0].view(np.uint64).any()
    assert not relayed.memory.heap[0].any()
    assert not relayed.memory.submit[0].view(np.uint64).any()
