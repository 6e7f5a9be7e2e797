"""By which of its addresses a device speaks: RoCE has a table of them for each port."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path

from blink_proto.rdma.binding import PORT, RdmaError

_V4_MAPPED = bytes(10) + b"\xff\xff"


def gid_of(address: str) -> bytes:
    """The 16 bytes that verbs know an IP address by.

    Raises:
        RdmaError: it is no IP address.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError as error:
        raise RdmaError(f"{address!r} is not an IP address") from error
    return parsed.packed if parsed.version == 6 else _V4_MAPPED + parsed.packed


def text_of(gid: bytes) -> str:
    """As the kernel's files have it: eight groups of four hexadecimal digits."""
    return ":".join(gid[at : at + 2].hex() for at in range(0, len(gid), 2))


def address_of(gid: bytes) -> str:
    """The IP address that became these 16 bytes."""
    if gid.startswith(_V4_MAPPED):
        return str(ipaddress.IPv4Address(gid[12:]))
    return str(ipaddress.IPv6Address(gid))


def index_of(wanted: bytes, device: str, length: int, read: Callable[[int], bytes | None]) -> int | None:
    """Index of an address in a table, for RoCE v2; None where it is not in there.

    Args:
        device: its name.
        length: of the table.
        read: an entry, or None where it cannot be had.
    """
    for index in range(length):
        if read(index) == wanted and _is_routable(device, index):
            return index
    return None


def _is_routable(device: str, index: int) -> bool:
    kind = Path(f"/sys/class/infiniband/{device}/ports/{PORT}/gid_attrs/types/{index}")
    try:
        return kind.read_text().strip() == "RoCE v2"
    except OSError:
        return True  # InfiniBand has no such table
