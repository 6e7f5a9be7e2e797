"""Offer and answer of the `verbs` transport: how two queue pairs find each other, and which memory one may reach.

All of it is secret: whoever knows queue-pair numbers, addresses and keys can write into the arena. It travels inside
the control plane's session, is kept in memory only, and shows nothing of itself in a repr.

Formats (big-endian). Endpoint: magic "BNKE", version u8, mtu u8 (enum ibv_mtu), lid u16, queue pair u32, first packet
number u32, GID 16 bytes. Answer: an endpoint, u16 number of inbound windows, u16 of outbound ones, then the windows,
each u64 offset in its region, u64 size, u64 remote address, u32 remote key.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from blink_proto.secret import SecretBytes, SecretInt

_ENDPOINT = struct.Struct(">4sBBHII16s")
_COUNTS = struct.Struct(">HH")
_WINDOW = struct.Struct(">QQQI")
_MAGIC, _VERSION = b"BNKE", 1
_QUEUE_PAIRS, _PACKETS = 1 << 24, 1 << 24
_LARGEST_MTU = 5
_ADDRESSES = 1 << 64


class WireError(ValueError):
    """The bytes are no such message."""


@dataclass(frozen=True)
class Endpoint:
    """One end of a reliable connection.

    `mtu` counts as ibv_mtu does (1: 256 bytes … 5: 4096); `lid` is 0 on Ethernet.
    """

    queue_pair: int
    first_packet: int
    gid: bytes
    lid: int
    mtu: int

    def to_bytes(self) -> bytes:
        """See the module."""
        return _ENDPOINT.pack(_MAGIC, _VERSION, self.mtu, self.lid, self.queue_pair, self.first_packet, self.gid)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Endpoint:
        """Raises:
        WireError: it is not one.
        """
        if len(raw) != _ENDPOINT.size:
            raise WireError("not an RDMA endpoint")
        magic, version, mtu, lid, queue_pair, first_packet, gid = _ENDPOINT.unpack(raw)
        if magic != _MAGIC or version != _VERSION:
            raise WireError("not an RDMA endpoint of this version")
        if not 1 <= mtu <= _LARGEST_MTU or not 0 < queue_pair < _QUEUE_PAIRS or first_packet >= _PACKETS:
            raise WireError("an RDMA endpoint with impossible numbers")
        return cls(SecretInt(queue_pair), SecretInt(first_packet), SecretBytes(gid), lid, mtu)

    def __repr__(self) -> str:
        return "Endpoint(redacted)"


@dataclass(frozen=True)
class Window:
    """Remote memory: `size` bytes from `offset` of a region of the arena lie at `address` under `key`.

    `address` is what work requests have to name. For GPU memory it need not be any address that the GPU's host knows.
    """

    offset: int
    size: int
    address: int
    key: int

    def covers(self, offset: int, size: int) -> bool:
        """Whether a range of the region lies in it as a whole."""
        return self.offset <= offset and offset + size <= self.offset + self.size

    def __repr__(self) -> str:
        return f"Window(offset={self.offset}, size={self.size}, redacted)"


@dataclass(frozen=True)
class Answer:
    """The runtime's end, and what the front end may write (inbound) and read (outbound)."""

    endpoint: Endpoint
    inbound: tuple[Window, ...]
    outbound: tuple[Window, ...]

    def to_bytes(self) -> bytes:
        """See the module."""
        windows = [_WINDOW.pack(one.offset, one.size, one.address, one.key) for one in (*self.inbound, *self.outbound)]
        return self.endpoint.to_bytes() + _COUNTS.pack(len(self.inbound), len(self.outbound)) + b"".join(windows)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Answer:
        """Raises:
        WireError: it is not one.
        """
        endpoint = Endpoint.from_bytes(raw[: _ENDPOINT.size])
        rest = raw[_ENDPOINT.size :]
        if len(rest) < _COUNTS.size:
            raise WireError("not the answer of an RDMA runtime")
        inbound, outbound = _COUNTS.unpack_from(rest)
        if len(rest) != _COUNTS.size + (inbound + outbound) * _WINDOW.size:
            raise WireError("not the answer of an RDMA runtime")
        fields = _WINDOW.iter_unpack(rest[_COUNTS.size :])
        windows = tuple(Window(offset, size, SecretInt(at), SecretInt(key)) for offset, size, at, key in fields)
        if any(one.size == 0 or one.address + one.size > _ADDRESSES for one in windows):
            raise WireError("the answer of an RDMA runtime with impossible memory")
        return cls(endpoint, windows[:inbound], windows[inbound:])

    def __repr__(self) -> str:
        return "Answer(redacted)"
