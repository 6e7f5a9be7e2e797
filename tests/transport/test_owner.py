"""Memory that only its owner can register, as GPU memory with nvidia-peermem: another process does it, in domains of
this one. Over real verbs alone (`tests/rdma`), with host memory, which the kernel pins of the process that asks, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from blink_proto import arena
from blink_proto.rdma.binding import Access, RdmaError, Shared, open_device
from blink_proto.rdma.choice import RdmaChoice
from blink_proto.rdma.wire import Answer
from dpu_service.transport.base import Range, Transport, TransportError
from gpu_runtime.registration import peermem
from gpu_runtime.registration.base import Registration, RegistrationError
from gpu_runtime.registration.grants import READABLE, WRITABLE
from gpu_runtime.registration.memory import LentMemory
from gpu_runtime.registration.parts import Part
from gpu_runtime.registration.peermem import PeermemMemory
from gpu_runtime.registration.verbs import VerbsRegistrar
from tests.transport.kinds import RDMA_ADDRESS, Kind
from tests.transport.site import PATIENCE, SIZES
from tests.transport.test_verbs import regions_of

BINDINGS = {"verbs": "ibverbs", "verbs-pyverbs": "pyverbs"}
CHANNEL = 1


class Lender:
    """An owner, and a registrar that has its arena."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self._before = kind, regions_of(kind)
        self.memory = LentMemory(SIZES)
        self.sizes = (self.memory._needed[True], self.memory._needed[False])
        end = self.memory.chain_end.fileno()
        command = [sys.executable, "-m", "tests.transport.owner", str(end), *map(str, self.sizes)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, pass_fds=[end], stdin=pipe, stdout=pipe, text=True)
        self._hear()
        self.memory.receive(lambda: self.process.poll() is not None)
        self.registrar = VerbsRegistrar(self.memory, SIZES, RdmaChoice("", RDMA_ADDRESS, BINDINGS[kind.name]))

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def told(self, *words: object) -> bytes:
        """What the owner answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return bytes.fromhex(self._hear())

    def enter(self) -> tuple[Transport, Registration]:
        """A front end."""
        connector = self.kind.connector()
        try:
            registration = self.registrar.register(connector.offer, (CHANNEL,))
            return connector.connect(registration.answer, SIZES, CHANNEL), registration
        finally:
            connector.close()

    def registered(self) -> int:
        """Regions of this registrar on the device; each front end has some of its own beside them."""
        return regions_of(self.kind) - self._before

    def close(self) -> None:
        """The registrar first, as at the end of a chain."""
        self.registrar.close()
        self.memory.close()
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.write("end\n")
            self.process.stdin.close()
        assert self.process.wait(PATIENCE) in (0, -signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def lender(kind: Kind) -> Iterator[Lender]:
    if kind.name not in BINDINGS:
        pytest.skip("takes real verbs")
    if reason := kind.why_not():
        pytest.skip(reason)
    made = Lender(kind)
    yield made
    made.close()
    assert made.registered() == 0


@pytest.fixture
def places(lender: Lender) -> tuple[int, int]:
    """Where the channel's heap is in the inbound region, and its log in the outbound one."""
    into, out = arena.InboundLayout(SIZES), arena.OutboundLayout(SIZES)
    return (
        into.channel_offset(CHANNEL) + into.channel_heap_offset,
        out.channel_offset(CHANNEL) + out.channel_log_offset,
    )


def fails(transport: Transport, place: int, words: str) -> None:
    def write() -> None:
        transport.commit(place, 0xBAD)
        transport.flush(PATIENCE)

    with pytest.raises(TransportError, match=words):
        write()


def test_it_is_reached_by_the_session_and_no_longer(
    lender: Lender, places: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    heap, log = places
    assert lender.memory.way == "peermem"
    transport, registration = lender.enter()
    assert all("nvidia-peermem" in line or "ibverbs" in line for line in caplog.messages if "windows" in line)
    transport.write(heap, b"payload!")
    transport.commit(heap + 8, 0x0102030405060708)
    transport.flush(PATIENCE)
    assert lender.told("read", "inbound", heap, 16) == b"payload!" + bytes(range(8, 0, -1))
    lender.told("write", "outbound", log, b"a record".hex())
    ticket = transport.fetch(Range(log, 8))
    while not transport.fetched(ticket):
        pass
    assert transport.read(log, 8) == b"a record"
    registration.revoke()
    fails(transport, heap, lender.kind.refusal)
    assert lender.told("read", "inbound", heap, 8) == b"payload!"
    transport.close()
    assert lender.registered() == 0


def test_nothing_beside_the_arena_and_no_more_rights(lender: Lender) -> None:
    held = lender.memory._lent
    assert isinstance(held, PeermemMemory)
    page, inbound = 64 << 10, lender.sizes[0]
    device = open_device("", RDMA_ADDRESS, (BINDINGS[lender.kind.name],))
    transport, registration = lender.enter()  # by which the owner has the device's file
    other = device.domain()

    def try_it(shared: Shared) -> None:
        own = Shared(held._asker._descriptor, 1 << 20)
        for part, access, words in (
            (Part(True, -(-inbound // page) * page - 4096, 8192), WRITABLE, "beside the arena"),
            (Part(False, (1 << 64) - 4096, 4096), READABLE, "beside the arena"),
            (Part(False, 0, 4096), WRITABLE, "no such rights"),
            (Part(True, 0, 4096), READABLE, "no such rights"),
            (Part(True, 0, 4096), WRITABLE | Access.BIND_WINDOWS, "no such rights"),
            (Part(True, 0, 4096), WRITABLE, "refused by the kernel"),  # there is no such domain
        ):
            with pytest.raises(RdmaError, match=words):
                held._asker.register(own, part, access)
        with pytest.raises(RdmaError, match="one RDMA device alone"):
            held._asker.register(shared, Part(True, 0, 4096), WRITABLE)
        raise RdmaError("as it should be")

    with pytest.raises(RdmaError, match="as it should be"):
        other.adopt(try_it)
    assert lender.registered() == 3 + 1, "the session's own, and its front end's"
    registration.revoke()
    transport.close()
    other.close()
    device.close()
    assert lender.registered() == 0


def test_an_owner_that_is_stopped_holds_nobody_up(
    lender: Lender, places: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, _ = places
    transport, registration = lender.enter()
    monkeypatch.setattr(peermem, "ANSWER_SECONDS", 0.3)
    os.kill(lender.process.pid, signal.SIGSTOP)
    try:
        registration.revoke()
        fails(transport, heap, ".")
        transport.close()
        with pytest.raises(RegistrationError, match="does not answer"):
            lender.enter()
        assert lender.registered() == 3
    finally:
        os.kill(lender.process.pid, signal.SIGCONT)
    monkeypatch.undo()
    assert lender.told("read", "inbound", heap, 8) != (0xBAD).to_bytes(8, "little")
    end = time.monotonic() + PATIENCE
    while lender.registered():
        assert time.monotonic() < end
        lender.registrar._end_revoked(float("inf"))
    transport, registration = lender.enter()
    transport.commit(heap, 7)
    transport.flush(PATIENCE)
    assert lender.told("read", "inbound", heap, 8) == (7).to_bytes(8, "little")
    registration.revoke()
    transport.close()


def test_an_owner_that_is_dead_is_not_needed_to_revoke(lender: Lender, places: tuple[int, int]) -> None:
    transport, registration = lender.enter()
    keys = {window.key for window in Answer.from_bytes(registration.answer).inbound}
    assert len(keys) == 1
    lender.process.kill()
    lender.process.wait(PATIENCE)
    registration.revoke()
    fails(transport, places[0], lender.kind.refusal)
    transport.close()
    assert lender.registered() == 0
    with pytest.raises(RegistrationError, match="no memory any more"):
        lender.enter()
