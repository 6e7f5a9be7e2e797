"""GPU memory that its owner registers (nvidia-peermem): which way is taken, what is asked for and refused, and what
happens when one of the two processes does not answer or is gone.

Both ends are real and in this process; the device is played. Real verbs: `tests/transport/test_owner.py`.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blink_proto import arena
from blink_proto.rdma.binding import Access, RdmaError, Shared
from blink_proto.rdma.uverbs import Registered, UverbsError, UverbsFile
from gpu_runtime.config import ConfigError, make_config
from gpu_runtime.registration import gpu_memory, peermem, ways
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.gpu_memory import check_device, hand_over
from gpu_runtime.registration.grants import READABLE, WRITABLE
from gpu_runtime.registration.handover import PAGE, RegionAddress, send_addresses
from gpu_runtime.registration.memory import LentMemory
from gpu_runtime.registration.parts import Part
from gpu_runtime.registration.peermem import Asker, OwnedRegion, OwnerGoneError
from gpu_runtime.registration.peermem_owner import Owner
from gpu_runtime.registration.peermem_wire import Answer, Kind, Outcome, Request
from gpu_runtime.registration.ways import AUTO, DMA_BUF, PEERMEM, Wish, choose_way
from tests.unit.test_registration_gpu import INBOUND, OUTBOUND, SIZES, Driver

FOREVER = 1 << 62
DOMAIN = 0xD0
FILE = Shared(0, DOMAIN)


class Device:
    """An open RDMA device, whoever has it: registers anything in one domain."""

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int, int]] = {}
        self.ever = 0

    def register(self, domain: int, address: int, size: int, access: int) -> Registered:
        if domain != DOMAIN:
            raise UverbsError("register", errno.ENOENT)
        self.ever += 1
        handle = 0x5EC0 + self.ever
        self.registered[handle] = (address, size, access)
        return Registered(handle, handle + 1, handle + 2)

    def deregister(self, region: int) -> None:
        if self.registered.pop(region, None) is None:
            raise UverbsError("deregister", errno.ENOENT)


class Pair:
    """Both ends."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.device, self.is_over = Device(), False
        self.owner = Owner(theirs, {True: INBOUND, False: OUTBOUND}, lambda descriptor: self.device)
        self.asker = Asker(ours, lambda: self.is_over, lambda descriptor: self.device)
        self.connection = ours
        self.file = os.open("/dev/null", os.O_RDONLY)
        self._started = False

    def start(self) -> None:
        self.owner.start()
        self._started = True

    def region(self, part: Part, access: Access = WRITABLE) -> OwnedRegion:
        return OwnedRegion(self.asker, self.asker.register(Shared(self.file, DOMAIN), part, access), 0)

    def close(self) -> None:
        self.connection.close()
        if self._started:
            self.owner.wait_end(5)
        os.close(self.file)


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = set(os.listdir("/proc/self/fd"))
    made = Pair()
    yield made
    made.close()
    made.owner._connection.close()
    assert set(os.listdir("/proc/self/fd")) == before


PART = Part(True, 4096, 8192)


def test_the_requests_and_answers_are_as_described() -> None:
    wanted = Request(Kind.REGISTER, 7, 0xD0, True, WRITABLE, 4096, 8192, 99)
    by_hand = struct.pack("<4sBBBBIIQQQ", b"BNKQ", 1, 2, 1, 3, 7, 0xD0, 4096, 8192, 99)
    assert wanted.to_bytes() == by_hand
    assert Request.from_bytes(by_hand) == wanted
    given = Answer(Outcome.REFUSED, 7, 1, 2, 3, errno.EFAULT)
    by_hand = struct.pack("<4sBBHIIII", b"BNKA", 1, 6, 14, 7, 1, 2, 3)
    assert given.to_bytes() == by_hand
    assert Answer.from_bytes(by_hand) == given
    for raw in (
        by_hand[:-1],
        by_hand + b"\0",
        b"BNKB" + by_hand[4:],
        b"BNKA\x02" + by_hand[5:],
        b"BNKA\x01\x09" + by_hand[6:],
    ):
        with pytest.raises(RdmaError, match="not an answer"):
            Answer.from_bytes(raw)


def test_a_part_is_registered_where_the_owner_has_it_and_given_back(pair: Pair) -> None:
    pair.start()
    first, second = pair.region(PART), pair.region(Part(False, 0, 4096), READABLE)
    assert sorted(pair.device.registered.values()) == [
        (INBOUND.address + 4096, 8192, 3),
        (OUTBOUND.address, 4096, 4),
    ]
    assert (first.local_key, first.key, second.key) == (0x5EC2, 0x5EC3, 0x5EC4)
    first.close()
    first.close()
    assert list(pair.device.registered) == [0x5EC2]
    second.close()
    assert pair.device.registered == {}


def raw(**changes: Any) -> bytes:
    fields = {"magic": b"BNKQ", "version": 1, "kind": 2, "inbound": 1, "access": 3, "number": 5, "handle": DOMAIN}
    fields |= {"offset": 0, "size": 4096, "deadline": FOREVER, **changes}
    return struct.pack("<4sBBBBIIQQQ", *fields.values())


@pytest.mark.parametrize(
    ("content", "descriptors", "outcome"),
    [
        (raw(offset=INBOUND.size - 4096, size=4097), 0, Outcome.OUTSIDE),
        (raw(offset=INBOUND.size), 0, Outcome.OUTSIDE),
        (raw(offset=(1 << 64) - 4096), 0, Outcome.OUTSIDE),
        (raw(size=(1 << 64) - 1), 0, Outcome.OUTSIDE),
        (raw(size=0), 0, Outcome.OUTSIDE),
        (raw(inbound=0, access=4, size=OUTBOUND.size + 1), 0, Outcome.OUTSIDE),
        (raw(access=4), 0, Outcome.RIGHTS),
        (raw(access=7), 0, Outcome.RIGHTS),
        (raw(access=0), 0, Outcome.RIGHTS),
        (raw(access=16 | 3), 0, Outcome.RIGHTS),
        (raw(access=64 | 3), 0, Outcome.RIGHTS),  # on demand, which has no name here
        (raw(access=128 | 3), 0, Outcome.RIGHTS),
        (raw(inbound=0, access=3), 0, Outcome.RIGHTS),
        (raw(inbound=0, access=5), 0, Outcome.RIGHTS),
        (raw(deadline=1), 0, Outcome.LATE),
        (raw(handle=DOMAIN + 1), 0, Outcome.REFUSED),
        (raw(kind=3, handle=99), 0, Outcome.UNKNOWN),
        (raw(kind=1), 0, Outcome.MALFORMED),
        (raw(kind=1), 2, Outcome.MALFORMED),
        (raw(kind=1), 1, Outcome.REFUSED),  # one is held already
        (raw(), 1, Outcome.MALFORMED),
        (raw(kind=3, handle=99), 1, Outcome.MALFORMED),
        (raw(kind=4), 0, Outcome.MALFORMED),
        (raw(kind=0), 0, Outcome.MALFORMED),
        (raw(inbound=2), 0, Outcome.MALFORMED),
        (raw(version=2), 0, Outcome.MALFORMED),
        (raw(magic=b"BNKA"), 0, Outcome.MALFORMED),
        (raw()[:-1], 0, Outcome.MALFORMED),
        (raw() + b"\0", 0, Outcome.MALFORMED),
        (b"\0", 1, Outcome.MALFORMED),
    ],
    ids=itertools.count(),
)
def test_what_is_not_for_front_ends_is_not_registered(
    pair: Pair, content: bytes, descriptors: int, outcome: Outcome
) -> None:
    assert pair.owner.answer(raw(kind=1), [os.dup(pair.file)]).outcome is Outcome.DONE
    pair.start()
    socket.send_fds(pair.connection, [content], [pair.file] * descriptors)
    pair.connection.settimeout(5)
    answer = Answer.from_bytes(pair.connection.recv(100))
    assert (answer.outcome, answer.handle, answer.key) == (outcome, 0, 0)
    assert answer.number in (0, 5)
    assert pair.device.ever == 0
    pair.connection.send(raw(number=6))
    assert Answer.from_bytes(pair.connection.recv(100)).outcome is Outcome.DONE, "and it goes on"


def test_nothing_is_registered_before_there_is_a_device(pair: Pair) -> None:
    for content in (raw(), raw(kind=3, handle=1)):
        assert pair.owner.answer(content, []).outcome is Outcome.UNKNOWN


def test_only_an_rdma_device_is_held() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = Owner(theirs, {True: INBOUND, False: OUTBOUND})
    asker = Asker(ours, lambda: False, lambda descriptor: Device())
    owner.start()
    with open("/dev/null") as other, pytest.raises(RdmaError, match="was refused"):
        asker.register(Shared(other.fileno(), DOMAIN), PART, WRITABLE)
    asker = Asker(ours, lambda: False)
    with open("/dev/null") as other, pytest.raises(RdmaError, match="no RDMA device's file"):
        asker.register(Shared(other.fileno(), DOMAIN), PART, WRITABLE)
    ours.close()
    owner.wait_end(5)


def test_only_one_device_is_used(pair: Pair) -> None:
    pair.start()
    pair.region(PART)
    with pytest.raises(RdmaError, match="one RDMA device alone"):
        pair.asker.register(Shared(1 << 20, DOMAIN), PART, WRITABLE)


def test_what_the_kernel_says_is_passed_on(pair: Pair) -> None:
    pair.start()
    with pytest.raises(RdmaError, match=r"refused by the kernel \(No such file or directory\)"):
        pair.asker.register(Shared(pair.file, DOMAIN + 1), PART, WRITABLE)


def test_the_end_gives_everything_back_there(pair: Pair) -> None:
    """So it does when the control process dies, whose sockets the kernel closes."""
    pair.start()
    pair.region(PART)
    pair.region(Part(False, 0, 4096), READABLE)
    pair.connection.close()
    pair.owner.wait_end(5)
    assert pair.device.registered == {}
    assert pair.device.ever == 2


def test_an_owner_that_is_gone(pair: Pair) -> None:
    """What it has registered is given back by nobody else while it may be alive: NVIDIA's driver would not let go."""
    pair.start()
    region = pair.region(PART)
    pair.owner._give_all_back = lambda: None  # type: ignore[method-assign]  # as when it is killed
    pair.owner._connection.shutdown(socket.SHUT_RDWR)
    pair.owner.wait_end(5)
    pair.owner._connection.close()
    for attempt in (region.close, region.close, lambda: pair.region(PART)):
        with pytest.raises(OwnerGoneError, match="no memory any more"):
            attempt()
    assert len(pair.device.registered) == 1
    pair.is_over = True
    region.close()
    assert pair.device.registered == {}
    region.close()
    os.close(pair.owner._descriptor)


def test_an_owner_that_gave_back_before_it_was_gone(pair: Pair) -> None:
    pair.start()
    region = pair.region(PART)
    pair.device.registered.clear()
    pair.owner._connection.shutdown(socket.SHUT_RDWR)
    pair.owner.wait_end(5)
    pair.is_over = True
    region.close()


@contextmanager
def nobody_answers(to_begin: float = 60) -> Iterator[None]:
    """What is asked here is not waited for long, and in vain."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peermem, "ANSWER_SECONDS", 0.05)
        patched.setattr(peermem, "_TO_BEGIN_SECONDS", to_begin)
        with pytest.raises(RdmaError, match="does not answer"):
            yield


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def answered(pair: Pair) -> None:
    """There is something to be read."""
    until(lambda: bool(_peek(pair.connection)))


def _peek(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (BlockingIOError, TimeoutError):
        return b""


def test_an_owner_that_is_silent_is_not_waited_for_twice(pair: Pair) -> None:
    began = time.monotonic()
    for _ in range(20):
        with nobody_answers():
            pair.region(PART)
    assert 0.05 <= time.monotonic() - began < 0.8, "once, not twenty times"
    pair.start()
    answered(pair)
    pair.region(PART)
    assert len(pair.device.registered) == 1


def test_a_region_that_came_too_late_is_given_back(pair: Pair) -> None:
    pair.owner.answer(raw(kind=1), [os.dup(pair.file)])
    pair.asker._keep(pair.device, pair.file)
    with nobody_answers():
        pair.region(PART)
    pair.start()
    answered(pair)
    assert len(pair.device.registered) == 1
    region = pair.region(Part(True, 0, 4096))
    assert [address for address, *_ in pair.device.registered.values()] == [INBOUND.address]
    region.close()
    assert (pair.device.registered, pair.device.ever) == ({}, 2)


def test_what_nobody_waits_for_any_more_is_not_done(pair: Pair) -> None:
    pair.owner.answer(raw(kind=1), [os.dup(pair.file)])
    pair.asker._keep(pair.device, pair.file)
    with nobody_answers(0.02):
        pair.region(PART)
    pair.start()
    answered(pair)
    assert pair.device.ever == 0


def test_a_region_that_was_given_back_late_is_not_given_back_again(pair: Pair) -> None:
    pair.owner.answer(raw(kind=1), [os.dup(pair.file)])
    pair.asker._keep(pair.device, pair.file)
    region = OwnedRegion(pair.asker, pair.owner.answer(raw(), []), 0)
    with nobody_answers():
        region.close()
    pair.start()
    answered(pair)
    assert pair.device.registered == {}
    region.close()
    assert not region.open


def test_an_answer_that_nobody_asked_for_is_no_answer(pair: Pair) -> None:
    pair.owner._connection.send(Answer(Outcome.DONE, 77, 1, 2, 3).to_bytes())
    with pytest.raises(RdmaError, match="what was not asked"):
        pair.region(PART)


def test_nothing_of_it_is_shown() -> None:
    request = Request(Kind.REGISTER, 1, 4242, True, WRITABLE, 4242, 4242, 4242)
    answer = Answer(Outcome.DONE, 1, 4242, 4242, 4242)
    asker = Asker(socket.socket(socket.AF_UNIX), lambda: False)
    region = OwnedRegion(asker, answer, 4242)
    shown = f"{request!r} {answer!r} {region!r} {Shared(4242, 4242)!r} {Registered(4242, 4242, 4242)!r}"
    shown += f" {region.key!r} {region.key} {region.local_key} {region.address} {RegionAddress(4242, 1)!r}"
    assert "4242" not in shown
    asker._connection.close()


# Which way is taken.


@pytest.mark.parametrize("doca", [False, True])
@pytest.mark.parametrize("peermem", [False, True])
@pytest.mark.parametrize("dma_buf", [False, True])
@pytest.mark.parametrize("way", [AUTO, DMA_BUF, PEERMEM])
def test_the_way(way: str, dma_buf: bool, peermem: bool, doca: bool) -> None:
    """The table, by hand: dma-bufs unless they are not there or not wished for; nothing else by doca."""
    taken = {
        (AUTO, True, False): DMA_BUF,
        (AUTO, True, True): DMA_BUF,
        (AUTO, False, True): "" if doca else PEERMEM,
        (DMA_BUF, True, False): DMA_BUF,
        (DMA_BUF, True, True): DMA_BUF,
        (PEERMEM, False, True): "" if doca else PEERMEM,
        (PEERMEM, True, True): "" if doca else PEERMEM,
    }.get((way, dma_buf, peermem), "")
    if taken:
        assert choose_way(Wish(way, doca), dma_buf=dma_buf, peermem=peermem) == taken
        return
    missing = {(PEERMEM, False): "nvidia-peermem is not loaded", (PEERMEM, True): "the doca transport"}.get(
        (way, peermem), "cannot be exported as dma-bufs"
    )
    with pytest.raises(RegistrationError, match=missing):
        choose_way(Wish(way, doca), dma_buf=dma_buf, peermem=peermem)


def test_what_both_ways_lack_is_said() -> None:
    with pytest.raises(RegistrationError, match=r"open kernel modules.*nvidia-peermem is not loaded"):
        choose_way(Wish(), dma_buf=False, peermem=False)
    with pytest.raises(RegistrationError, match=r"open kernel modules.*the doca transport reaches"):
        choose_way(Wish(doca=True), dma_buf=False, peermem=True)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "has_peermem", lambda: True)


def test_the_device_is_asked_for_the_order_of_writes_all_the_same(loaded: None) -> None:
    assert check_device(Driver(dmabuf=0), 0, Wish()) == PEERMEM
    for attributes in ({"ordering": 0}, {"supported": 0}):
        with pytest.raises(RegistrationError, match=r"commit word|GPUDirect"):
            check_device(Driver(dmabuf=0, **attributes), 0, Wish(PEERMEM))


@pytest.mark.parametrize("way", [DMA_BUF, PEERMEM])
def test_copies_to_the_arena_are_made_synchronous(way: str, loaded: None) -> None:
    """For the whole allocation, where that begins; before anything is handed over."""
    driver, memory = Driver(), LentMemory(SIZES)
    assert hand_over(driver, 0, Wish(way), INBOUND, OUTBOUND, memory.chain_end) == way
    assert driver.pointers == {("sync", INBOUND.address - PAGE): 1, ("sync", OUTBOUND.address - PAGE): 1}
    memory.receive(lambda: False)
    assert memory.way == way
    memory.close()
    for descriptors in driver.exports.values():
        os.close(descriptors[1])


def test_a_driver_that_does_not_do_that_hands_nothing_over(loaded: None) -> None:
    driver, memory = Driver(), LentMemory(SIZES)
    refused = driver.cuDeviceGetAttribute("dmabuf", 0)[0].__class__.CUDA_ERROR_NOT_SUPPORTED
    driver.cuPointerSetAttribute = lambda *_: (refused,)  # type: ignore[method-assign]
    with pytest.raises(RegistrationError, match=r"synchronous \(CUDA_ERROR_NOT_SUPPORTED\)"):
        hand_over(driver, 0, Wish(PEERMEM), INBOUND, OUTBOUND, memory.chain_end)
    with pytest.raises(RegistrationError, match="two regions"):
        memory.receive(lambda: False)
    memory.close()


class Domain:
    """Of a binding's domain, what is used."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def adopt(self, register: Callable[[Shared], Any]) -> Any:
        return register(self._shared)


def test_the_control_process_registers_no_more_than_the_arena(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory, device = LentMemory(SIZES), Device()
    theirs = memory.chain_end.dup()
    send_addresses(memory.chain_end, INBOUND, OUTBOUND)
    memory.receive(lambda: False)
    assert (memory.way, "the GPU's memory by peermem" in caplog.text) == (PEERMEM, True)
    assert "nvidia-peermem" in memory.no_windows
    held: Any = memory._lent
    held._asker._open_file = lambda descriptor: device
    owner = Owner(theirs, {True: INBOUND, False: OUTBOUND}, lambda descriptor: device)
    owner.start()
    domain: Any = Domain(Shared(theirs.fileno(), DOMAIN))
    needed = arena.InboundLayout(SIZES).total_bytes
    for part in (Part(True, needed - 4096, 8192), Part(True, -4096, 4096), Part(True, 0, 0)):
        with pytest.raises(RdmaError, match="within the arena"):
            memory.register(domain, part, WRITABLE)
    region = memory.register(domain, Part(True, needed - 4096, 4096), WRITABLE)
    assert int(region.address) == INBOUND.address + needed - 4096
    region.close()
    memory.close()
    owner.wait_end(5)
    assert (memory.way, device.ever) == ("", 1)
    with pytest.raises(RdmaError, match="not there"):
        memory.register(domain, PART, WRITABLE)


@pytest.mark.parametrize(
    ("address", "size", "descriptors", "words"),
    [
        (0, INBOUND.size, 0, "impossible address"),
        (INBOUND.address + 4096, INBOUND.size, 0, "on pages"),
        (INBOUND.address, PAGE - 1, 0, "on pages"),
        (INBOUND.address, 0, 0, "are needed"),
        (INBOUND.address, INBOUND.size, 1, "two regions"),
        (INBOUND.address, INBOUND.size, 2, "two regions"),
    ],
)
def test_addresses_that_cannot_be_are_refused(address: int, size: int, descriptors: int, words: str) -> None:
    memory = LentMemory(SIZES)
    content = struct.pack("<4sBBB", b"BNKM", 2, 2, 2) + struct.pack("<QQQ", address, size, 0)
    content += struct.pack("<QQQ", OUTBOUND.address, OUTBOUND.size, 0)
    with open("/dev/null") as file:
        socket.send_fds(memory.chain_end, [content], [file.fileno()] * descriptors)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RegistrationError, match=words):
        memory.receive(lambda: False)
    assert len(os.listdir("/proc/self/fd")) == before - 1, "its own end for the chain's process"
    memory.close()


def test_the_option() -> None:
    chosen = {"transports": ("verbs",), "rdma_address": "192.0.2.1"}
    assert make_config("cuda", **chosen).rdma_wish == Wish(AUTO, doca=False)
    assert make_config("cuda", gpu_memory=PEERMEM, **chosen).rdma_wish == Wish(PEERMEM, doca=False)
    chosen["transports"] = ("verbs", "doca")
    assert make_config("cuda", gpu_memory=DMA_BUF, **chosen).rdma_wish == Wish(DMA_BUF, doca=True)
    with pytest.raises(ConfigError, match="the doca transport reaches GPU memory by dma-bufs alone"):
        make_config("cuda", gpu_memory=PEERMEM, **chosen)
    with pytest.raises(ConfigError, match="--gpu-memory must be one of: auto, dma-buf, peermem"):
        make_config("cuda", gpu_memory="bar1")
    with pytest.raises(ConfigError, match="the soft GPU's memory is the host's"):
        make_config("cpu", gpu_memory=PEERMEM)


def test_the_module_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(ways, "MODULE", tmp_path / "nvidia_peermem")
    assert not ways.has_peermem()
    (tmp_path / "nvidia_peermem").mkdir()
    assert ways.has_peermem()


def test_a_real_device_file_is_asked_for() -> None:
    """What stands in for it here is not what is used otherwise."""
    assert Owner.__init__.__defaults__ == (UverbsFile,)
    assert Asker.__init__.__defaults__ == (UverbsFile,)
