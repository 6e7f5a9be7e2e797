"""The `doca` transport over the stand-in for its libraries, between two processes where that matters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dpu_service.transport.doca.transport as transport_module
from dpu_service.transport.base import Range, TransportError
from dpu_service.transport.doca.connector import DocaConnector
from dpu_service.transport.doca.session import READS, WRITE_BYTES, WRITES
from dpu_service.transport.doca.transport import DocaTransport
from tests.transport.doca.pair import INBOUND, OUTBOUND, SIZES, Pair, Runtime, runtime_process, settings

IN, OUT = INBOUND.channel_offset(1), OUTBOUND.channel_offset(1)


@pytest.fixture
def runtime(doca_shim: Path) -> Iterator[Runtime]:
    with runtime_process(doca_shim) as made:
        yield made


@pytest.fixture
def pair(doca_shim: Path) -> Iterator[Pair]:
    made = Pair(doca_shim)
    yield made
    made.close()


def wait_for(transport: DocaTransport, *ranges: Range) -> None:
    ticket = transport.fetch(*ranges)
    deadline = time.monotonic() + 5
    while not transport.fetched(ticket):
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def fails_within(transport: DocaTransport, seconds: float = 3.0) -> str:
    """What it says once it has noticed; the same ever after, whatever is called."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            transport.commit(IN, 1)
            transport.read(0, 8)
        except TransportError as error:
            said = str(error)
            break
        time.sleep(0.01)
    else:
        pytest.fail("it did not notice")
    for again in (lambda: transport.write(IN, b"x"), lambda: transport.fetch(Range(0, 8)), transport._collect):
        with pytest.raises(TransportError) as caught:
            again()
        assert str(caught.value) == said
    return said


def test_a_runtime_that_dies_breaks_the_connection(runtime: Runtime):
    transport = runtime.connect()
    os.kill(runtime.process.pid, signal.SIGKILL)
    runtime.process.wait()
    assert fails_within(transport) == "the connection to the arena is gone: a task failed with DOCA_ERROR_IO_FAILED"
    transport.close()
    transport.close()


@pytest.mark.parametrize("after", [0.002, 0.03])
def test_a_runtime_may_die_amidst_writes_and_reads(after: float, runtime: Runtime):
    transport = runtime.connect()
    killer = threading.Timer(after, runtime.process.kill)
    killer.start()

    def flood() -> None:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            transport.write(IN + INBOUND.channel_heap_offset, bytes(5 * WRITE_BYTES))
            transport.fetch(Range(OUT, 4096))
            transport.flush(5)

    with pytest.raises(TransportError, match="DOCA_ERROR_IO_FAILED"):
        flood()
    killer.join()
    transport.close()


@pytest.mark.parametrize("work", ["write", "read"])
def test_a_device_that_never_does_its_work_has_lost_it(work: str, pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transport_module, "STUCK_SECONDS", 0.3)
    transport, _ = pair.connect()
    time.sleep(0.4)  # rest is not work left undone
    transport.commit(IN, 1)
    transport.flush(5)
    monkeypatch.setenv("DOCA_SHIM_LOSE", "1")
    start = time.monotonic()
    if work == "write":
        transport.commit(IN, 2)
    else:
        transport.fetch(Range(OUT, 8))
    assert fails_within(transport) == "the connection to the arena is gone: the device has not done its work"
    assert time.monotonic() - start >= 0.3
    transport.close()


def test_keys_end_with_the_session(runtime: Runtime):
    transport = runtime.connect()
    assert runtime.tell("revoke") == "revoked"
    before = runtime.arena.inbound.copy()
    fails_within(transport)
    assert (runtime.arena.inbound == before).all()
    transport.close()
    again = runtime.connect()
    again.commit(IN, 9)
    again.flush(5)
    assert runtime.arena.inbound[IN] == 9
    again.close()


def test_a_front_end_that_dies_leaves_the_runtime_alone(runtime: Runtime, doca_shim: Path):
    child = os.fork()
    if child == 0:
        runtime.connect().commit(IN, 5)
        os._exit(0)
    os.waitpid(child, 0)
    transport = runtime.connect()
    transport.commit(IN, 6)
    transport.flush(5)
    assert runtime.arena.inbound[IN] == 6
    transport.close()


INBOUND_KEYS, OUTBOUND_KEYS = 0, 1
SHIM_BLOB = struct.Struct("<8s64sQQQ")
"""The shim's exports of memory: a mark, the page's name, key, address, size."""


def forged(answer: bytes, which: int, *, of: int | None = None, key: int = 0, shift: int = 0, size: int = 0) -> bytes:
    """The answer with one of the channel's exports changed, or put in the place of the other one."""
    fields = json.loads(answer)
    keys = fields["channels"]["1"]
    mark, name, true_key, address, true_size = SHIM_BLOB.unpack(b64decode(keys[which if of is None else of]))
    blob = SHIM_BLOB.pack(mark, name, true_key ^ key, address + shift, size or true_size)
    keys[which] = b64encode(blob).decode()
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"which": INBOUND_KEYS, "key": 1},
        {"which": OUTBOUND_KEYS, "key": 1 << 63},
        {"which": INBOUND_KEYS, "shift": INBOUND.channel_bytes},
        {"which": INBOUND_KEYS, "shift": -8},
        {"which": OUTBOUND_KEYS, "shift": -OUTBOUND.channel_bytes},
        {"which": INBOUND_KEYS, "of": OUTBOUND_KEYS, "size": INBOUND.channel_bytes},
        {"which": OUTBOUND_KEYS, "of": INBOUND_KEYS, "size": OUTBOUND.channel_bytes},
    ],
    ids=[
        "key",
        "key for reading",
        "beside",
        "before",
        "beside, for reading",
        "write what is read",
        "read what is written",
    ],
)
def test_a_forged_answer_opens_nothing(change: dict[str, int], doca_shim: Path, pair: Pair):
    connector = DocaConnector(settings(doca_shim))
    registration = pair.registrar.register(connector.offer, (1,))

    def use() -> None:
        transport = connector.connect(forged(registration.answer, **change), SIZES, 1)
        transport.commit(IN, 77)
        transport.flush(5)

    with pytest.raises(TransportError, match="DOCA_ERROR_IO_FAILED"):
        use()
    assert not pair.arena.inbound.any()
    assert not pair.arena.outbound[OUT:].any()
    connector.close()
    registration.revoke()


def test_keys_of_another_front_end_open_nothing(doca_shim: Path, pair: Pair):
    victim, victims = pair.connect(channel=2)
    connector = DocaConnector(settings(doca_shim))
    registration = pair.registrar.register(connector.offer, (1,))
    stolen = json.loads(registration.answer)
    stolen["channels"]["2"] = json.loads(victims.answer)["channels"]["2"]
    with pytest.raises(TransportError, match="DOCA_ERROR_IO_FAILED"):
        connector.connect(json.dumps(stolen).encode(), SIZES, 2)
    connector.close()
    registration.revoke()
    victim.commit(INBOUND.channel_offset(2), 3)
    victim.flush(5)
    assert pair.arena.inbound[INBOUND.channel_offset(2)] == 3


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 8), (IN - 8, 8), (IN + INBOUND.channel_bytes, 8), (IN + INBOUND.channel_bytes - 4, 8), (-8, 8)],
)
def test_writes_stay_in_the_channel(offset: int, size: int, pair: Pair):
    transport, _ = pair.connect()
    with pytest.raises(TransportError, match="not in this front end's part"):
        transport.write(offset, bytes(size))
    with pytest.raises(TransportError):
        transport.commit(offset, 1)
    transport.commit(IN, 1)


@pytest.mark.parametrize(
    ("offset", "size"), [(OUT - 8, 8), (OUT + OUTBOUND.channel_bytes, 8), (OUT + 4, 8), (OUT, 4), (-8, 8), (OUT, -8)]
)
def test_reads_stay_in_what_was_given(offset: int, size: int, pair: Pair):
    transport, _ = pair.connect()
    for call in (lambda: transport.read(offset, size), lambda: transport.fetch(Range(offset, size))):
        with pytest.raises(TransportError):
            call()
    assert transport.read(OUT, 8) == bytes(8)


def test_commits_come_after_their_payload_however_many_wait(pair: Pair):
    """A reader that checks all the time never sees a number before the payload that belongs to it."""
    transport, _ = pair.connect()
    place = IN + INBOUND.channel_heap_offset
    word = pair.arena.inbound[IN : IN + 8].view("<u8")
    payload = pair.arena.inbound[place : place + 4096].view("<u8")
    for number in range(1, 4 * WRITES):
        transport.write(place, np.full(512, number, "<u8").tobytes())
        transport.commit(IN, number)
        seen = int(word[0])
        assert int(payload.min()) >= seen
    transport.flush(10)
    assert int(word[0]) == 4 * WRITES - 1


def test_too_many_fetches_ask_for_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    transport, _ = pair.connect()
    pool = transport._parts[1].pool
    tickets = [transport.fetch(Range(OUT, 8))]
    monkeypatch.setattr(type(transport._session.engine), "drain", lambda self: 0)
    monkeypatch.setattr(transport, "_arm", lambda: None)
    while pool.free:
        tickets.append(transport.fetch(Range(OUT, 8)))
    assert len(tickets) >= READS
    refused = transport.fetch(Range(OUT, 8))
    assert not transport.fetched(refused)
    monkeypatch.undo()
    deadline = time.monotonic() + 5
    while not transport.fetched(tickets[-1]):
        assert time.monotonic() < deadline
    wait_for(transport, Range(OUT, 8))
    assert transport.fetched(refused)


@pytest.mark.parametrize("once", [False, True])
def test_news_wake_an_event_loop_and_nothing_else_does(once: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch):
    if once:
        monkeypatch.setenv("DOCA_SHIM_EDGE", "1")
    transport, _ = pair.connect()
    descriptor = transport.descriptor
    assert descriptor is not None
    woken: list[bytes] = []

    async def follow() -> None:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def look() -> None:
            woken.append(transport.read(OUT, 8))
            arrived.set()

        loop.add_reader(descriptor, look)
        await asyncio.sleep(0.05)
        assert woken == []
        for number in range(1, 20):
            pair.arena.outbound[OUT] = number
            arrived.clear()
            ticket = transport.fetch(Range(OUT, 8))
            while not transport.fetched(ticket):
                await asyncio.wait_for(arrived.wait(), 5)
            assert transport.read(OUT, 8)[0] == number
        spent = len(woken)
        transport.commit(IN, 1)
        await asyncio.sleep(0.05)
        assert len(woken) <= spent + 1
        assert not transport._session.engine.armed
        loop.remove_reader(descriptor)

    asyncio.run(follow())
    assert len(woken) <= 22


def test_what_was_written_last_gets_out_at_the_end(pair: Pair):
    transport, _ = pair.connect()
    for number in range(200):
        transport.commit(IN, number)
    transport.close()
    assert pair.arena.inbound[IN] == 199
    with pytest.raises(TransportError, match="gone: closed"):
        transport.commit(IN, 1)


def test_another_arena_is_refused(doca_shim: Path, pair: Pair):
    from dataclasses import replace

    connector = DocaConnector(settings(doca_shim))
    registration = pair.registrar.register(connector.offer, (1,))
    with pytest.raises(TransportError, match="not of the arena's sizes"):
        connector.connect(registration.answer, replace(SIZES, log_slots=4096), 1)
    connector.close()
    registration.revoke()


def test_an_answer_without_the_channel_is_refused(doca_shim: Path, pair: Pair):
    connector = DocaConnector(settings(doca_shim))
    registration = pair.registrar.register(connector.offer, (1,))
    for answer, channel in ((registration.answer, 2), (b"{}", 1)):
        with pytest.raises(TransportError, match="not one of the doca transport"):
            connector.connect(answer, SIZES, channel)
    connector.close()
    registration.revoke()
