"""Contract of transports, the memory's part: what is written, in which order, and what reads show."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest

from blink_proto import arena
from dpu_service.transport.base import Range, TransportError
from tests.transport.site import PATIENCE, Site

WORD = 8


def test_whoever_sees_a_committed_word_sees_the_payload_before_it(site: Site) -> None:
    transport, heap, size, rounds = site.enter().transport, site.heap(), 2048, 300
    seen: list[str] = []

    def watch() -> None:
        memory = site.device.inbound
        for turn in range(1, rounds + 1):
            at = heap + turn % 2 * (size + WORD)
            site.until(lambda at=at, turn=turn: site.written(at + size) >= turn)  # type: ignore[misc]
            if bytes(memory[at : at + size]) != bytes([turn % 251]) * size:
                seen.append(f"round {turn}")
            done.release()

    done = threading.Semaphore(2)  # two places in turn: one is written while the other one is looked at
    watcher = threading.Thread(target=watch)
    watcher.start()
    for turn in range(1, rounds + 1):
        assert done.acquire(timeout=PATIENCE)
        at = heap + turn % 2 * (size + WORD)
        transport.write(at, bytes([turn % 251]) * size)
        transport.commit(at + size, turn)
        transport.fetch()
    watcher.join(PATIENCE)
    assert not watcher.is_alive()
    assert seen == []


def test_words_are_written_whole_and_in_order(site: Site) -> None:
    transport, place = site.enter().transport, site.heap()
    halves = [count << 32 | count for count in range(1, 2001)]
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(site.written(place))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for word in halves:
        transport.commit(place, word)
    transport.flush(PATIENCE)
    site.until(lambda: site.written(place) == halves[-1])
    stop.set()
    watcher.join()
    assert all(word >> 32 == word & 0xFFFFFFFF for word in seen)
    assert all(a <= b for a, b in itertools.pairwise(seen))


def test_more_is_written_at_once_than_can_be_under_way(site: Site) -> None:
    transport, heap = site.enter().transport, site.heap()
    whole = bytes(range(256)) * (4 * site.device.sizes.heap_tokens // 256)  # half a mebibyte
    for first in range(8):
        transport.write(heap, whole[first:] + whole[:first])
        transport.commit(heap, first)
    transport.flush(PATIENCE)
    assert site.written(heap) == 7
    assert bytes(site.device.inbound[heap + WORD : heap + len(whole)]) == (whole[7:] + whole[:7])[WORD:]


def test_a_payload_that_is_longer_than_anything_on_the_way_holds(new_site: Callable[..., Site]) -> None:
    """3.5 MiB: more than a transport's local memory, and than all its work that is under way."""
    sizes = arena.Sizes(channels=1, submit_slots=4, cancel_slots=2, log_slots=8, heap_tokens=1 << 20)
    site = new_site(sizes=sizes)
    transport, heap = site.enter().transport, site.heap()
    content = np.random.default_rng(7).bytes(7 << 19)
    transport.write(heap, content)
    transport.commit(heap + len(content), 0x3500)
    transport.flush(PATIENCE)
    assert site.written(heap + len(content)) == 0x3500
    assert bytes(site.device.inbound[heap : heap + len(content)]) == content


def test_a_fetch_shows_what_was_there_when_it_was_asked_for(site: Site) -> None:
    transport, log = site.enter().transport, site.log()
    for word in range(1, 60):
        site.publish(log, word)
        site.publish(log + 64, 2 * word)
        ticket = transport.fetch(Range(log, WORD), Range(log + 64, WORD))
        site.until(lambda ticket=ticket: transport.fetched(ticket))  # type: ignore[misc]
        assert int.from_bytes(transport.read(log, WORD), "little") == word
        assert int.from_bytes(transport.read(log + 64, WORD), "little") == 2 * word


def test_reads_never_show_anything_older_with_several_fetches_under_way(site: Site) -> None:
    transport, log = site.enter().transport, site.log()
    shown = [0]
    for word in range(1, 400):
        site.publish(log + 64, word)  # first the far word: whoever sees the near one may count on it
        site.publish(log, word)
        transport.fetch(Range(log, WORD), Range(log + 64, WORD))
        near = int.from_bytes(transport.read(log, WORD), "little")
        far = int.from_bytes(transport.read(log + 64, WORD), "little")
        assert shown[-1] <= near <= far <= word
        shown.append(near)
    ticket = transport.fetch(Range(log, WORD))
    site.until(lambda: transport.fetched(ticket) or transport.fetch(Range(log, WORD)) < 0)
    site.until(lambda: int.from_bytes(transport.read(log, WORD), "little") == 399)


@pytest.mark.parametrize("offset", [-8, 1 << 40])
def test_nothing_outside_of_the_arena_can_be_named(site: Site, offset: int) -> None:
    transport = site.enter().transport
    with pytest.raises(TransportError):
        transport.write(offset, b"x")
    with pytest.raises(TransportError):
        transport.commit(offset, 1)
    with pytest.raises(TransportError):
        transport.read(offset, WORD)


def test_words_have_to_be_aligned(site: Site) -> None:
    transport = site.enter().transport
    with pytest.raises(TransportError):
        transport.commit(site.heap() + 4, 1)
    with pytest.raises(TransportError):
        transport.read(site.log() + 4, WORD)
    with pytest.raises(TransportError):
        transport.read(site.log(), 12)


def test_after_the_end_everything_is_refused(site: Site) -> None:
    transport = site.enter().transport
    transport.close()
    with pytest.raises(TransportError):
        transport.commit(site.heap(), 1)
    with pytest.raises(TransportError):
        transport.read(site.log(), WORD)
