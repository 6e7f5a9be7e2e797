"""Contract of transports, the bad end: either side goes at any point, and what comes after is whole again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from blink_proto import arena
from blink_proto.arena import Finish
from dpu_service.transport.base import Range, Transport, TransportError
from tests.replay import Script
from tests.transport.kinds import Kind
from tests.transport.runtime import Runtime, runtime_of
from tests.transport.site import PATIENCE, SIZES, Site, ask, poll_until_over, tokens_of
from tests.transport.victim import PAYLOAD_BYTES, RECORD_BYTES, payload_of

INBOUND, OUTBOUND = arena.InboundLayout(SIZES), arena.OutboundLayout(SIZES)


def start_victim(site: Site, channel: int = 0) -> tuple[subprocess.Popen[str], object]:
    if not site.kind.apart:
        pytest.skip("a stand-in within one process")
    command = [sys.executable, "-m", "tests.transport.victim", site.kind.name, str(channel)]
    command.append(json.dumps(asdict(site.device.sizes)))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    registration = site.registrar.register(bytes.fromhex(process.stdout.readline()), (channel,))
    process.stdin.write(registration.answer.hex() + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    return process, registration


def committed(site: Site) -> dict[int, int]:
    """Numbers of the records in the ring, by slot."""
    ring = site.inbound.channel_offset(0) + site.inbound.channel_submit_offset
    slots = range(site.device.sizes.submit_slots)
    return {slot: site.written(ring + (slot + 1) * RECORD_BYTES - 8) for slot in slots}


@pytest.mark.parametrize("patience", [0.0, 0.03, 0.11])
def test_a_front_end_is_killed_and_no_committed_record_is_without_its_payload(site: Site, patience: float) -> None:
    process, registration = start_victim(site)
    site.until(lambda: max(committed(site).values()) > 0)
    time.sleep(patience)
    process.kill()
    process.wait()
    time.sleep(0.2)  # for what the dead process's machine still has on the wire
    ring, heap = site.inbound.channel_offset(0) + site.inbound.channel_submit_offset, site.heap()
    memory, slots = site.device.inbound, site.device.sizes.submit_slots
    newest = max(committed(site).values())
    for slot, number in committed(site).items():
        if number and number + slots > newest + 1:  # the slot behind the newest record may be half written anew
            assert bytes(memory[heap + slot * PAYLOAD_BYTES :][:PAYLOAD_BYTES]) == payload_of(number)
            assert (
                bytes(memory[ring + slot * RECORD_BYTES :][: RECORD_BYTES - 8])
                == payload_of(number)[: RECORD_BYTES - 8]
            )
    registration.revoke()  # type: ignore[attr-defined]
    client = site.client()
    position = ask(client, [1])
    assert tokens_of(poll_until_over(site, client, 1)[position or 0]) == [0]


def test_the_channel_goes_on_with_a_new_connection_after_a_lost_one(guarded_site: Site) -> None:
    site = guarded_site
    site.device.script = lambda s: Script([s.prompt[0]] * 3, Finish.STOP)
    first = site.enter()
    client = site.lease(first)
    ask(client, [5])
    poll_until_over(site, client, 1)
    first.registration.revoke()
    with pytest.raises(TransportError):
        site.until(lambda: site.step(client) and client.poll() is None)
    again = site.client()
    position = ask(again, [6])
    assert position == 1, "positions count on where the first lease ended"
    assert tokens_of(poll_until_over(site, again, 1)[position]) == [6, 6, 6]


def test_a_runtime_that_is_gone_is_noticed_and_a_new_one_is_reached(kind: Kind, guarded_site: Site) -> None:
    entrance = guarded_site.enter()
    client = guarded_site.lease(entrance)
    ask(client, [1])
    guarded_site.die()
    with pytest.raises(TransportError):
        guarded_site.until(lambda: client.fetch() is not None or client.poll() is None)
    successor = Site(kind, epoch=2)
    try:
        fresh = successor.client()
        ask(fresh, [1])
        assert tokens_of(poll_until_over(successor, fresh, 1)[0]) == [0]
    finally:
        successor.close()


@pytest.fixture
def runtime(kind: Kind) -> Iterator[Runtime]:
    """A process of its own."""
    if reason := kind.why_not():
        pytest.skip(reason)
    if not kind.apart:
        pytest.skip("a stand-in within one process")
    with runtime_of(kind, SIZES) as made:
        yield made


HEAP = INBOUND.channel_offset(0) + INBOUND.channel_heap_offset
LOG = OUTBOUND.channel_offset(0) + OUTBOUND.channel_log_offset


def test_a_runtime_that_is_stopped_takes_and_gives_as_before(runtime: Runtime) -> None:
    transport = runtime.enter()
    runtime.process.send_signal(signal.SIGSTOP)
    payload = bytes(range(256)) * 300
    transport.write(HEAP, payload)
    transport.commit(HEAP + len(payload), 1234)
    transport.flush(PATIENCE)
    assert runtime.inbound[HEAP : HEAP + len(payload)] == payload
    assert runtime.inbound[HEAP + len(payload) :][:8] == (1234).to_bytes(8, "little")
    runtime.outbound[LOG : LOG + 8] = b"a record"
    ticket, end = transport.fetch(Range(LOG, 8)), time.monotonic() + PATIENCE
    while not transport.fetched(ticket):
        assert time.monotonic() < end
    assert transport.read(LOG, 8) == b"a record"
    transport.close()


def fails(transport: Transport) -> bool:
    """Whether it has noticed that nobody is there any more."""
    try:
        transport.write(HEAP, bytes(100_000))
        transport.commit(HEAP, 1)
        transport.fetch(Range(LOG, 8))
        transport.read(LOG, 8)
    except TransportError:
        return True
    return False


@pytest.mark.parametrize("busy", [False, True])
def test_a_runtime_that_is_killed_is_noticed(runtime: Runtime, busy: bool) -> None:
    """At rest, or amidst writes and reads. In shared memory nothing tells of it but the device's heartbeat."""
    transport = runtime.enter()
    if busy:
        killer = threading.Timer(0.02, runtime.process.kill)
        killer.start()
    else:
        runtime.process.kill()
        runtime.process.wait()
    if runtime.kind.guards:
        end = time.monotonic() + PATIENCE
        while not fails(transport):
            assert time.monotonic() < end, "it was not noticed"
            time.sleep(0.001)
        with pytest.raises(TransportError):
            transport.commit(HEAP, 2)
    else:
        runtime.process.wait()
        assert not fails(transport)
    transport.close()


def test_nobody_answers(guarded_site: Site) -> None:
    """The runtime's end is gone before the front end has connected."""

    def too_late(answer: bytes) -> bytes:
        guarded_site.die()
        return answer

    with pytest.raises(TransportError):
        guarded_site.enter(forge=too_late).transport.fetch(Range(guarded_site.log(), 8))


def test_a_device_that_stands_still_is_no_lost_connection(site: Site) -> None:
    client = site.client()
    site.device.frozen = True
    for i in range(200):
        client.beat(1_000_000_000 + i)
        client.fetch()
        assert client.poll() == []
    site.device.frozen = False
    ask(client, [1])
    poll_until_over(site, client, 1)
