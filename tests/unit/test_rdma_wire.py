"""Offer and answer of the `verbs` transport: what was packed comes back, and nothing else is taken."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink_proto.rdma.wire import Answer, Endpoint, Window, WireError

endpoints = st.builds(
    Endpoint,
    queue_pair=st.integers(1, (1 << 24) - 1),
    first_packet=st.integers(0, (1 << 24) - 1),
    gid=st.binary(min_size=16, max_size=16),
    lid=st.integers(0, (1 << 16) - 1),
    mtu=st.integers(1, 5),
)
windows = st.builds(
    Window,
    offset=st.integers(0, 1 << 40),
    size=st.integers(1, 1 << 40),
    address=st.integers(0, (1 << 64) - (1 << 40)),
    key=st.integers(0, (1 << 32) - 1),
)
answers = st.builds(
    Answer,
    endpoint=endpoints,
    inbound=st.lists(windows, max_size=3).map(tuple),
    outbound=st.lists(windows, max_size=3).map(tuple),
)


@given(answers)
def test_an_answer_comes_back(answer: Answer) -> None:
    assert Answer.from_bytes(answer.to_bytes()) == answer
    assert Endpoint.from_bytes(answer.endpoint.to_bytes()) == answer.endpoint


@given(answers, st.integers(0, 200), st.binary(max_size=3))
def test_nothing_that_is_cut_or_longer_is_taken(answer: Answer, cut: int, more: bytes) -> None:
    raw = answer.to_bytes()
    changed = raw[: cut % len(raw)] if cut else raw + b"\0" + more
    with pytest.raises(WireError):
        Answer.from_bytes(changed)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_refused(raw: bytes) -> None:
    with contextlib.suppress(WireError):
        assert Answer.from_bytes(raw).to_bytes() == raw


def test_the_format_is_the_written_one() -> None:
    """By hand, from the module's description."""
    gid = bytes(10) + b"\xff\xff\x0a\x09\x00\x01"
    endpoint = b"BNKE" + struct.pack(">BBHII", 1, 3, 0, 17, 99) + gid
    raw = endpoint + struct.pack(">HH", 1, 0) + struct.pack(">QQQI", 4096, 8192, 0x7F0000001000, 0xABCD)
    answer = Answer(Endpoint(17, 99, gid, 0, 3), (Window(4096, 8192, 0x7F0000001000, 0xABCD),), ())
    assert answer.to_bytes() == raw


@pytest.mark.parametrize(("queue_pair", "mtu"), [(0, 3), (17, 0), (17, 6)])
def test_impossible_numbers_are_refused(queue_pair: int, mtu: int) -> None:
    with pytest.raises(WireError):
        Endpoint.from_bytes(Endpoint(queue_pair, 1, bytes(16), 0, mtu).to_bytes())


def test_secrets_do_not_show() -> None:
    window = Window(0, 64, 0x7F00DEADBEEF, 0x5EC2E7)
    answer = Answer(Endpoint(0x123456, 7, bytes(16), 0, 3), (window,), ())
    for thing in (window, answer, answer.endpoint):
        shown = f"{thing!r} {thing}"
        assert not any(text in shown for text in ("5ec2e7", str(0x5EC2E7), str(0x7F00DEADBEEF), str(0x123456)))
