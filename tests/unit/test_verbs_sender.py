"""The `verbs` transport's own parts over a queue pair that is played: order, room, failure. Real ones: `tests/rdma`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink_proto.rdma.binding import Done, RdmaError, Read, Write
from blink_proto.rdma.wire import Window
from dpu_service.transport.base import Range, TransportError
from dpu_service.transport.verbs.memory import PinnedMemory, Staging
from dpu_service.transport.verbs.mirror import SLOT_BYTES, SLOTS, Mirror
from dpu_service.transport.verbs.sender import DEPTH, Batch, Payload, Sender
from dpu_service.transport.verbs.windows import Windows

STAGING = 4096


class Pair:
    """Does what is posted when told to, in order, on `memory`: remote addresses are places in it."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.memory = bytearray(size)
        self.posted: list[tuple[list[Write | Read], int]] = []
        self.done: list[Done] = []
        self.under_way = 0

    def post(self, works: Sequence[Write | Read], number: int) -> None:
        self.under_way += len(works)
        if self.under_way > DEPTH:
            raise RdmaError("the queue is full")
        self.posted.append((list(works), number))

    def work(self, batches: int = 1) -> None:
        for works, number in self.posted[:batches]:
            for work in works:
                if isinstance(work, Write):
                    self.memory[work.remote : work.remote + work.size] = ctypes.string_at(work.local, work.size)
                else:
                    content = bytes(self.memory[work.remote : work.remote + work.size])
                    ctypes.memmove(work.local, content, work.size)
            self.under_way -= len(works)
            self.done.append(Done(number, ""))
        del self.posted[:batches]

    def poll(self) -> list[Done]:
        done, self.done = self.done, []
        return done


class Domain:
    def register(self, address: int, size: int, access: Any) -> Any:
        return SimpleNamespace(local_key=1, close=lambda: None)


def make_sender(pair: Pair) -> tuple[Sender, PinnedMemory]:
    memory = PinnedMemory(Domain(), STAGING + SLOTS * SLOT_BYTES)  # type: ignore[arg-type]
    return Sender(pair, memory, Staging(0, STAGING)), memory  # type: ignore[arg-type]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 900), st.integers(1, 1500)), min_size=1, max_size=6), min_size=1, max_size=40
    ),
    st.randoms(),
)
def test_everything_arrives_in_order_whatever_room_there_is(writes: list[list[tuple[int, int]]], chance: Any) -> None:
    """Also where a batch finds room for its first payloads alone, or is more than the whole ring holds."""
    pair = Pair(4096)
    sender, _ = make_sender(pair)
    expected = bytearray(4096)
    for number, places in enumerate(writes):
        payloads = [Payload(bytes([(number + 7 * i) % 256]) * size, place, 7) for i, (place, size) in enumerate(places)]
        for payload in payloads:
            expected[payload.remote : payload.remote + len(payload.content)] = payload.content
        sender.send_payloads(payloads)
        if chance.random() < 0.4:
            pair.work(chance.randrange(3))
            sender.progress()
    for _ in range(1000):
        pair.work()
        sender.progress()
    assert sender.idle
    assert pair.memory == expected


def test_a_batch_is_no_longer_than_the_queue_and_no_larger_than_the_ring() -> None:
    pair = Pair()
    sender, _ = make_sender(pair)
    sender.send_payloads([Payload(b"x", place, 7) for place in range(DEPTH + 3)])
    sender.send_payloads([Payload(bytes(1500), 0, 7) for _ in range(5)])
    sizes = []
    while pair.posted:
        sizes.append([work.size for works, _ in pair.posted for work in works])
        pair.work(len(pair.posted))
        sender.progress()
    assert sizes == [[1] * DEPTH, [1, 1, 1, 1500, 1500], [1500, 1500], [1500]]
    assert sender.idle


BACK, VAIN = 0, -1
"""The oldest bytes are given back; the newest ones were taken in vain."""


@given(st.lists(st.one_of(st.integers(1, 120), st.sampled_from([BACK, VAIN])), max_size=200))
def test_staged_bytes_never_overlap(steps: list[int]) -> None:
    staging, live = Staging(64, 128), []
    for step in steps:
        if step in (BACK, VAIN):
            if live:
                (staging.give_back if step == BACK else staging.take_back)(1)
                live.pop(0 if step == BACK else -1)
            continue
        at = staging.take(step)
        if at is not None:
            assert at >= 64
            assert at + step <= 64 + 128
            assert all(at + step <= start or start + size <= at for start, size in live)
            live.append((at, step))
        else:
            assert live, "an empty ring takes whatever is no longer than it is"


def test_a_failed_completion_fails_everything_after_it() -> None:
    pair = Pair()
    sender, _ = make_sender(pair)
    sender.send(Batch([Payload(b"x", 0, 7)]))
    pair.done.append(Done(1, "remote access error"))
    with pytest.raises(TransportError, match="remote access error"):
        sender.progress()
    for again in (sender.progress, sender.check, lambda: sender.send(Batch([Payload(b"y", 1, 7)]))):
        with pytest.raises(TransportError):
            again()


def test_work_that_is_never_done_fails_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dpu_service.transport.verbs.sender.time.monotonic", lambda: now[0])
    pair = Pair()
    sender, _ = make_sender(pair)
    now[0] += 1000  # with nothing under way
    sender.progress()
    sender.send(Batch([Payload(b"x", 0, 7)]))
    sender.send(Batch([Payload(b"y", 1, 7)]))
    now[0] += 1000  # this process was stopped meanwhile; the work was done
    pair.work(1)
    sender.progress()
    pair.work(1)
    sender.progress()
    sender.send(Batch([Payload(b"z", 2, 7)]))
    now[0] += 9
    sender.progress()
    now[0] += 2
    with pytest.raises(TransportError, match="has not done its work"):
        sender.progress()


def make_mirror(pair: Pair, size: int) -> tuple[Mirror, Sender]:
    sender, memory = make_sender(pair)
    return Mirror(sender, memory, STAGING, Windows([Window(0, size, 0, 9)], size), size), sender


def test_a_fetch_is_shown_when_it_is_whole_and_in_its_turn() -> None:
    pair = Pair()
    mirror, sender = make_mirror(pair, 4096)
    first = mirror.fetch((Range(0, 8), Range(64, 8)))
    pair.memory[0:8], pair.memory[64:72] = b"1" * 8, b"2" * 8
    pair.work()
    pair.memory[0:8] = b"3" * 8
    second = mirror.fetch((Range(0, 8),))
    assert mirror.read(0, 8) == bytes(8)
    sender.progress()
    assert (mirror.fetched(first), mirror.fetched(second)) == (True, False)
    assert mirror.read(0, 8) + mirror.read(64, 8) == b"1" * 8 + b"2" * 8
    pair.work()
    sender.progress()
    assert mirror.fetched(second)
    assert mirror.read(0, 8) == b"3" * 8


def test_a_fetch_too_many_is_not_asked_for_and_its_ticket_waits_for_the_next() -> None:
    pair = Pair()
    mirror, sender = make_mirror(pair, 4096)
    tickets = [mirror.fetch((Range(0, 8),)) for _ in range(SLOTS + 1)]
    assert len(pair.posted) == SLOTS
    pair.work(SLOTS)
    sender.progress()
    assert [mirror.fetched(ticket) for ticket in tickets] == [True] * SLOTS + [False]
    assert mirror.fetch((Range(0, 8),)) == tickets[-1]


def test_a_fetch_of_nothing_has_nothing_under_way() -> None:
    pair = Pair()
    mirror, sender = make_mirror(pair, 4096)
    assert mirror.fetched(mirror.fetch(()))
    ticket = mirror.fetch((Range(0, 8),))
    assert mirror.fetch(()) == ticket
    assert not mirror.fetched(ticket)
    pair.work()
    sender.progress()
    assert mirror.fetched(ticket)
    assert sender.idle


def test_windows_bound_what_can_be_named() -> None:
    windows = Windows([Window(4096, 64, 1_000_000, 5), Window(8192, 64, 2_000_000, 6)], 1 << 20)
    assert windows.find(4100, 60) == (1_000_004, 5)
    assert windows.find(8192, 64, aligned=True) == (2_000_000, 6)
    for offset, size in ((4095, 2), (4100, 61), (0, 8), (8256, 1), (4096, -1)):
        with pytest.raises(TransportError):
            windows.find(offset, size)
    with pytest.raises(TransportError):
        Windows([Window(4096, 64, 0, 5)], 4100)
