"""GPU memory that its owner registers (nvidia-peermem): which way is taken, what is asked for and refused, and what
happens when one of the two processes does not answer or is gone.

Both ends are real and in this process; the device is played. Real verbs: `tests/transport/test_owner.py`.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blink_proto.rdma.binding import Access, RdmaError, Shared
from blink_proto.rdma.uverbs import Registered, UverbsError
from gpu_runtime.registration import peermem
from gpu_runtime.registration.grants import READABLE, WRITABLE
from gpu_runtime.registration.handover import RegionAddress
from gpu_runtime.registration.parts import Part
from gpu_runtime.registration.peermem import Asker, OwnedRegion, OwnerGoneError
from gpu_runtime.registration.peermem_owner import Owner
from gpu_runtime.registration.peermem_wire import Answer, Kind, Outcome, Request
from tests.unit.test_registration_gpu import INBOUND, OUTBOUND

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
    assert set(os.listdir("/proc/self/fd")) <= before, "others may have closed theirs meanwhile"


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
