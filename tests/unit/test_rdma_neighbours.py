"""Finding the way to an RDMA peer before its queue pair is connected: what the kernel says is what comes of it."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from blink_proto.rdma.binding import RdmaError
from blink_proto.rdma.gids import address_of, gid_of, index_of, text_of
from blink_proto.rdma.neighbours import wake_neighbour


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_peer_that_refuses_the_connection_is_there(address: str) -> None:
    begun = time.monotonic()
    try:
        wake_neighbour(address, address)
    except RdmaError as error:
        if ":" in address:
            pytest.skip(f"no IPv6 here: {error}")
        raise
    assert time.monotonic() - begun < 1


def test_an_address_that_is_not_ours_leads_nowhere() -> None:
    with pytest.raises(RdmaError, match="no way to the peer"):
        wake_neighbour("192.0.2.1", "127.0.0.1")


def test_a_peer_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answers, played: nobody has the address, at once or while it is waited for."""
    for answers in ([113], [115, 113], [101]):
        later = answers[1:]
        monkeypatch.setattr("socket.socket.connect_ex", lambda *_, now=answers[0]: now)
        monkeypatch.setattr("socket.socket.getsockopt", lambda *_, later=later: later[0])
        with pytest.raises(RdmaError, match="nobody has the peer's address"):
            wake_neighbour("127.0.0.1", "127.0.0.2")


TABLE = """\
IP address       HW type     Flags       HW address            Mask     Device
127.0.0.9        0x1         0x0         00:00:00:00:00:00     *        eth0
127.0.0.1        0x1         0x0         00:00:00:00:00:00     *        eth1
127.0.0.1        0x1         0x2         52:54:00:12:34:56     *        eth0
"""


def test_the_table_of_neighbours_decides_where_no_answer_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "arp").write_text(TABLE)
    monkeypatch.setattr("blink_proto.rdma.neighbours._ARP", tmp_path / "arp")
    monkeypatch.setattr("socket.socket.connect_ex", lambda *_: 115)  # EINPROGRESS, for ever
    monkeypatch.setattr("socket.socket.getsockopt", lambda *_: 115)
    wake_neighbour("127.0.0.1", "127.0.0.1", 5)
    with pytest.raises(RdmaError, match="nobody has the peer's address"):
        wake_neighbour("127.0.0.1", "127.0.0.9", 0.1)
    wake_neighbour("127.0.0.1", "127.0.0.2", 0.1)  # beyond a router: the kernel shall see


@pytest.mark.parametrize("address", ["10.9.0.1", "fe80::1", "2001:db8::17"])
def test_addresses_and_gids(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    assert gid_of(address) == (packed if len(packed) == 16 else bytes(10) + b"\xff\xff" + packed)
    assert address_of(gid_of(address)) == address


def test_gids_as_the_kernel_writes_them() -> None:
    assert text_of(gid_of("10.9.0.1")) == "0000:0000:0000:0000:0000:ffff:0a09:0001"
    assert text_of(gid_of("fe80::1")) == "fe80:0000:0000:0000:0000:0000:0000:0001"


@pytest.mark.parametrize("place", [0, 63, 64, 255])
def test_the_whole_table_is_looked_at(place: int) -> None:
    table = [bytes(16)] * 256
    table[place] = gid_of("10.9.0.1")
    assert index_of(gid_of("10.9.0.1"), "played0", len(table), table.__getitem__) == place
    assert index_of(gid_of("10.9.0.2"), "played0", len(table), table.__getitem__) is None
