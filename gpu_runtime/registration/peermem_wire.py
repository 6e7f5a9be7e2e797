"""What control process and chain's process say to each other where the latter registers its memory (nvidia-peermem).

The control process asks, the chain's process answers each request; both over the socket by which the memory was lent
(`handover`). A request: magic "BNKQ", version u8, kind u8, 1 for the inbound region or 0 u8, rights u8, number u32,
handle u32, then u64 offset in the region, u64 bytes, u64 time of CLOCK_MONOTONIC in nanoseconds until which it is to be
done. `HOLD` brings the descriptor of an RDMA device's open file; the handle is a protection domain's number there with
`REGISTER`, and a region's with `DEREGISTER`. An answer: magic "BNKA", version u8, outcome u8, errno u16, number u32 of
the request, u32 handle of a new region, u32 local key, u32 key. All of it little-endian, and secret.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from blink_proto.rdma.binding import Access, RdmaError

REQUEST = struct.Struct("<4sBBBBIIQQQ")
ANSWER = struct.Struct("<4sBBHIIII")
_ASKS, _ANSWERS, _VERSION = b"BNKQ", b"BNKA", 1

NOTHING = Access(0)


class Kind(IntEnum):
    """What is wanted."""

    HOLD = 1
    """Keep the device's file that comes with it until the connection ends."""
    REGISTER = 2
    DEREGISTER = 3


class Outcome(IntEnum):
    """What came of it."""

    DONE = 0
    MALFORMED = 1
    """Not a request, or not with the descriptors that it needs."""
    OUTSIDE = 2
    """More than the arena's region."""
    RIGHTS = 3
    """More than front ends may do with the region."""
    UNKNOWN = 4
    """No file is held, or no such region was registered."""
    LATE = 5
    """The time was over before anything was done."""
    REFUSED = 6
    """The kernel or the device's driver refuses."""


WORDS = {
    Outcome.MALFORMED: "did not understand the request",
    Outcome.OUTSIDE: "registers no memory beside the arena",
    Outcome.RIGHTS: "gives no such rights",
    Outcome.UNKNOWN: "knows nothing of it",
    Outcome.LATE: "was asked too long ago",
    Outcome.REFUSED: "was refused",
}


@dataclass(frozen=True)
class Request:
    """See the module."""

    kind: Kind
    number: int
    handle: int = 0
    inbound: bool = False
    access: Access = NOTHING
    offset: int = 0
    size: int = 0
    deadline: int = 0

    def to_bytes(self) -> bytes:
        """See the module."""
        what = (self.kind, self.inbound, self.access, self.number, self.handle)
        return REQUEST.pack(_ASKS, _VERSION, *what, self.offset, self.size, self.deadline)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Request:
        """Raises:
        RdmaError: it is not one.
        """
        if len(raw) != REQUEST.size:
            raise RdmaError("not a request")
        magic, version, kind, inbound, access, number, handle, offset, size, deadline = REQUEST.unpack(raw)
        if magic != _ASKS or version != _VERSION or kind not in set(Kind) or inbound > 1:
            raise RdmaError("not a request of this version")
        return cls(Kind(kind), number, handle, bool(inbound), Access(access), offset, size, deadline)

    def __repr__(self) -> str:
        return f"Request({self.kind.name}, redacted)"


@dataclass(frozen=True)
class Answer:
    """See the module."""

    outcome: Outcome
    number: int
    handle: int = 0
    local_key: int = 0
    key: int = 0
    errno: int = 0

    def to_bytes(self) -> bytes:
        """See the module."""
        keys = (self.handle, self.local_key, self.key)
        return ANSWER.pack(_ANSWERS, _VERSION, self.outcome, self.errno, self.number, *keys)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Answer:
        """Raises:
        RdmaError: it is not one.
        """
        if len(raw) != ANSWER.size:
            raise RdmaError("not an answer of the chain's process")
        magic, version, outcome, errno, number, handle, local_key, key = ANSWER.unpack(raw)
        if magic != _ANSWERS or version != _VERSION or outcome not in set(Outcome):
            raise RdmaError("not an answer of the chain's process of this version")
        return cls(Outcome(outcome), number, handle, local_key, key, errno)

    def __repr__(self) -> str:
        return f"Answer({self.outcome.name}, redacted)"
