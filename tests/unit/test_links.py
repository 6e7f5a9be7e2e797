"""Which addresses declare a network private, and what a program tries of its machine at its start."""

from __future__ import annotations

import pytest

from blink_proto.adapters import try_adapters
from blink_proto.links import LinkError, check_link, ip_address_of
from blink_proto.rdma import binding
from blink_proto.rdma.choice import RdmaChoice

PRIVATE = ["192.168.200.1", "10.9.0.1", "172.31.255.1", "169.254.3.4", "100.64.0.9", "127.0.0.2", "fd00::7", "fe80::1"]
NOT_PRIVATE = {
    "8.8.8.8": "public address",
    "172.32.0.1": "public address",  # just behind 172.16.0.0/12
    "2606:4700::1111": "public address",
    "::ffff:8.8.8.8": "public address",  # the same, written as IPv6
    "0.0.0.0": "stands for every interface",
    "::": "stands for every interface",
    "224.0.0.251": "no interface's own",
    "ff02::1": "no interface's own",
    "255.255.255.255": "no interface's own",
    "240.0.0.1": "no interface's own",
    "fe80::1%eth0": "has a zone",
    "banana": "no IP address",
    "10.9.0.1:4791": "no IP address",
    "10.9.0": "no IP address",
    " 10.9.0.1": "no IP address",
    "": "RDMA needs --rdma-address: naming it declares that interface's network private",
}


@pytest.mark.parametrize("transport", ["verbs", "doca"])
@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_declare_a_network_private(transport: str, address: str) -> None:
    check_link([transport], address)


@pytest.mark.parametrize("transports", [["verbs"], ["shm", "doca"]])
@pytest.mark.parametrize("address", NOT_PRIVATE)
def test_addresses_that_cannot(transports: list[str], address: str) -> None:
    with pytest.raises(LinkError, match=NOT_PRIVATE[address]):
        check_link(transports, address)


@pytest.mark.parametrize("address", NOT_PRIVATE)
def test_shared_memory_asks_for_no_address(address: str) -> None:
    check_link(["shm"], address)


@pytest.mark.parametrize(
    ("transports", "words"),
    [(["pigeon"], "no 'pigeon'"), (["shm", "tcp", "rdma"], "no 'tcp', 'rdma'"), ([""], "no ''"), ([], "is empty")],
)
def test_transports_that_there_are_not_come_first(transports: list[str], words: str) -> None:
    with pytest.raises(LinkError, match=f"{words}; there are: shm, verbs, doca"):
        check_link(transports, "")


def test_an_ipv4_address_is_one_however_it_is_written() -> None:
    assert ip_address_of("::ffff:10.9.0.1") == ip_address_of("10.9.0.1")


class Opened:
    """A device, of which one counts how often it was closed."""

    def __init__(self, name: str, address: str) -> None:
        self.asked, self.closed = (name, address), 0
        OPENED.append(self)

    def close(self) -> None:
        self.closed += 1


OPENED: list[Opened] = []


def test_the_chosen_device_is_opened_and_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    OPENED.clear()
    monkeypatch.setitem(binding.OPENERS, "counted", Opened)
    try_adapters(["shm"], RdmaChoice("mlx5_0", "10.9.0.1", "counted"))
    assert OPENED == []
    try_adapters(["shm", "verbs"], RdmaChoice("mlx5_0", "10.9.0.1", "counted"))
    assert [(one.asked, one.closed) for one in OPENED] == [(("mlx5_0", "10.9.0.1"), 1)]


def test_relaxed_ordering_is_refused_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    OPENED.clear()
    monkeypatch.setitem(binding.OPENERS, "counted", Opened)
    monkeypatch.setenv("MLX5_RELAXED_PACKET_ORDERING_ON", "1")
    for transport in ("verbs", "doca"):
        with pytest.raises(LinkError, match="MLX5_RELAXED_PACKET_ORDERING_ON is set"):
            try_adapters([transport], RdmaChoice("", "10.9.0.1", "counted"))
    try_adapters(["shm"], RdmaChoice())
    assert OPENED == []
