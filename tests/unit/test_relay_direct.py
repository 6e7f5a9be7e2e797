"""Channels whose front ends reach device memory by themselves: the relay leaves them alone, and they change hands."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from blink_proto import arena
from gpu_runtime.scheduler import host
from tests.emulation.relayed import Relayed, ask_lease, submit

CONTROL = ("lease", "heartbeat", "log_read")
MS = 1_000_000


def words(relayed: Relayed, channel: int) -> list[int]:
    """The control words that the scheduler looks at."""
    return [int(relayed.device.control[channel][name]) for name in CONTROL]


def direct(relayed: Relayed, channels: int) -> None:
    """As when a front end is granted channels over RDMA."""
    relayed.set_direct(channels)
    relayed.pull(1)
    assert relayed.direct_seen == channels


def test_what_a_network_card_wrote_is_not_overwritten(relayed: Relayed) -> None:
    """Neither at a ring of others nor after a while, whatever stands in host memory."""
    direct(relayed, 0b10)
    for name, value in zip(CONTROL, (7, 8, 9), strict=True):
        relayed.device.control[1][name] = value
        relayed.memory.control[1][name] = value + 100
    submit(relayed.memory, 3, lease=7, channel=1)
    for now in (50 * MS, 100 * MS):
        relayed.ring()
        relayed.pull(now)
    assert words(relayed, 1) == [7, 8, 9]
    assert not relayed.device.submit[1]["commit"].any()


def test_the_other_channels_are_still_relayed(relayed: Relayed) -> None:
    direct(relayed, 0b10)
    ask_lease(relayed.memory)
    relayed.ring()
    relayed.pull(2)
    relayed.step(2)
    assert relayed.lease == 1


def test_a_direct_channel_is_served_without_a_ring(relayed: Relayed) -> None:
    """The scheduler is reached, and answers where a network card reads; the control process sees who lives."""
    direct(relayed, 0b10)
    assert relayed.rests
    ask_lease(relayed.device, channel=1)
    assert not relayed.rests
    relayed.step(2)
    assert int(relayed.device.out[1]["lease"]) == int(relayed.device.out[1]["live"]) == 1
    assert int(relayed.memory.out[1]["lease"]) == int(relayed.memory.out[1]["live"]) == 1
    assert relayed.rests
    submit(relayed.device, 1, channel=1, max_tokens=0)  # refused, which is answered at once
    assert not relayed.rests
    relayed.pull(3)
    relayed.step(3)
    assert int(relayed.device.out[1]["log_written"]) == 1
    assert arena.unpack_token_head(relayed.device.log[1]["head"][:1])[1] == int(arena.RecordKind.REJECT)
    assert relayed.memory.log[1]["head"][0] == 0, "records of direct channels are not copied"
    relayed.device.control[1]["log_read"] = 1
    assert not relayed.rests
    relayed.step(4)
    assert relayed.rests
    relayed.device.cancels[1][0]["target"] = 0
    relayed.device.cancels[1][0]["commit"] = arena.pack_commit_word(1, 1)
    assert not relayed.rests


def test_a_pull_takes_note_without_a_ring(relayed: Relayed) -> None:
    relayed.pull(50 * MS)  # it has just looked
    relayed.set_direct(0b01)
    assert relayed.direct_seen == 0
    relayed.pull(50 * MS + 1)
    assert relayed.direct_seen == 0b01


def test_from_host_memory_to_a_network_card(relayed: Relayed) -> None:
    """What the local front end has last written stays until the new one writes, and its lease is the next one's."""
    ask_lease(relayed.memory)
    submit(relayed.memory, 1)
    relayed.ring()
    relayed.pull(1)
    relayed.step(1)
    relayed.set_direct(0b01)
    relayed.memory.control[0]["lease"] = 5  # it goes on writing
    relayed.ring()
    relayed.pull(2)
    relayed.step(2)
    assert words(relayed, 0) == [1, 1, 0]
    ask_lease(relayed.device, lease=2)
    relayed.ring()
    relayed.pull(3)
    relayed.step(3)
    assert (relayed.lease, int(relayed.memory.out[0]["live"])) == (2, 1)
    assert int(relayed.memory.out[0]["protocol_errors"]) == 0


def test_from_a_network_card_to_host_memory(relayed: Relayed) -> None:
    """The words that the control process has cleared end the old lease; the log goes on behind what was not copied."""
    direct(relayed, 0b01)
    ask_lease(relayed.device)
    relayed.step(1)
    submit(relayed.device, 5, max_tokens=0)
    relayed.pull(2)
    relayed.step(2)
    relayed.set_direct(0)  # the words in host memory are zero
    relayed.pull(3)
    assert relayed.direct_seen == 0
    relayed.step(3)
    assert [int(relayed.memory.out[0][name]) for name in ("lease", "live", "log_written", "submit_read")] == [
        1,
        0,
        5,
        5,
    ]
    ask_lease(relayed.memory, lease=2)
    relayed.ring()
    relayed.pull(4)
    relayed.step(4)
    assert int(relayed.memory.out[0]["log_start"]) == 5
    submit(relayed.memory, 1, lease=2, first=5, max_tokens=0)
    relayed.ring()
    relayed.pull(5)
    relayed.step(5)
    heads = arena.unpack_token_head(relayed.memory.log[0]["head"])
    assert np.flatnonzero(heads[1]).tolist() == [5]
    assert int(heads[3][5]) == 5
    assert int(relayed.memory.out[0]["protocol_errors"]) == 0


def test_a_dead_front_ends_lease_expires(relay_library: Path) -> None:
    host.use_library(relay_library)
    relayed = Relayed(relay_library, lease_timeout_ns=1000)
    direct(relayed, 0b01)
    ask_lease(relayed.device)
    relayed.step(10)
    assert int(relayed.memory.out[0]["live"]) == 1
    relayed.memory.control[0]["heartbeat"] = 99  # nobody's
    relayed.ring()
    relayed.pull(1009)
    relayed.step(1010)
    assert int(relayed.memory.out[0]["live"]) == 0
    ask_lease(relayed.device, lease=2)
    relayed.step(1011)
    assert int(relayed.memory.out[0]["live"]) == 1
    host.use_library(None)
