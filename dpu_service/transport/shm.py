"""The arena in POSIX shared memory, for front ends on the runtime's own machine."""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from blink_proto import arena
from dpu_service.transport.base import Range, TransportError
from dpu_service.transport.native import shm_library

SHM_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"/[A-Za-z0-9._-]{1,200}")
_WORD = 8
_SCRATCH_BYTES = 1 << 20


class ShmBlob(msgspec.Struct, frozen=True):
    """The session's transport blob (JSON): the names of both regions. A secret."""

    inbound: str
    outbound: str

    def __repr__(self) -> str:
        return "ShmBlob(redacted)"


@dataclass(frozen=True)
class _Mapping:
    """A mapped region; `keeper` keeps the memory mapped as long as `address` is used."""

    address: int
    size: int
    keeper: object


class ShmTransport:
    """See `Transport`. The outbound region is mapped read-only.

    Args:
        blob: from the session.
        inbound_bytes, outbound_bytes: sizes of the regions by the session's layout.

    Raises:
        TransportError: the blob is malformed, or the files are missing or of another size.
    """

    def __init__(self, blob: bytes, inbound_bytes: int, outbound_bytes: int) -> None:
        names = _decode(blob)
        self._library = shm_library()
        self._inbound = _map(names.inbound, inbound_bytes, writable=True)
        self._outbound = _map(names.outbound, outbound_bytes, writable=False)
        scratch = np.zeros(_SCRATCH_BYTES, np.uint8)
        self._scratch = memoryview(scratch)  # type: ignore[arg-type]
        self._scratch_address: int = scratch.ctypes.data

    def write(self, offset: int, payload: bytes) -> None:
        """Copies into shared memory."""
        _check(self._inbound, offset, len(payload))
        self._library.blink_shm_write(self._inbound.address + offset, payload, len(payload))

    def commit(self, offset: int, word: int) -> None:
        """A store with release order, and a ring of the arena's bell for a GPU that maps this memory."""
        _check(self._inbound, offset, _WORD, aligned=True)
        bell = self._inbound.address + arena.BELL_OFFSETS["rings"]  # the region begins with the bell
        self._library.blink_shm_commit(self._inbound.address + offset, word, bell)

    def read(self, offset: int, size: int) -> bytes:
        """Word by word, then an acquire fence."""
        _check(self._outbound, offset, size, aligned=True)
        if size > _SCRATCH_BYTES:
            return self.read(offset, _SCRATCH_BYTES) + self.read(offset + _SCRATCH_BYTES, size - _SCRATCH_BYTES)
        self._library.blink_shm_read(self._scratch_address, self._outbound.address + offset, size // _WORD)
        return self._scratch[:size].tobytes()

    def fetch(self, *ranges: Range) -> int:
        """`read` looks at the memory itself, so there is nothing to bring up to date."""
        return 0

    def fetched(self, ticket: int) -> bool:
        """Always."""
        return True

    @property
    def descriptor(self) -> int | None:
        """None: nothing has to arrive."""
        return None

    def flush(self, timeout: float) -> None:
        """Shared memory has nothing under way."""

    def close(self) -> None:
        """Unmaps both regions; any later use is a `TransportError`."""
        self._inbound = self._outbound = _Mapping(0, 0, None)


class ShmConnector:
    """See `Connector`. The names of the regions are all that is needed, and the runtime has them."""

    offer = b""

    def connect(self, answer: bytes, sizes: arena.Sizes, channel: int) -> ShmTransport:
        """Maps both regions (errors: see ShmTransport)."""
        return ShmTransport(answer, arena.InboundLayout(sizes).total_bytes, arena.OutboundLayout(sizes).total_bytes)

    def close(self) -> None:
        """Holds nothing."""


def _decode(blob: bytes) -> ShmBlob:
    try:
        names = msgspec.json.decode(blob, type=ShmBlob)
    except msgspec.DecodeError as error:
        raise TransportError("the session's transport blob is not one of the shm transport") from error
    if not all(_NAME.fullmatch(name) and ".." not in name for name in (names.inbound, names.outbound)):
        raise TransportError("the session's transport blob names no shared memory")
    return names


def _map(name: str, size: int, *, writable: bool) -> _Mapping:
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(SHM_FOLDER / name[1:], flags)
    except OSError as error:
        raise TransportError(f"the arena's shared memory is gone ({error.strerror})") from None
    try:
        if os.fstat(descriptor).st_size != size:
            raise TransportError("the arena's shared memory is not of the session's size")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)
    view = np.frombuffer(mapped, np.uint8)
    return _Mapping(int(view.ctypes.data), size, view)


def _check(mapping: _Mapping, offset: int, size: int, *, aligned: bool = False) -> None:
    if offset < 0 or size < 0 or offset + size > mapping.size:
        raise TransportError(f"{size} bytes at {offset} do not lie within a region of {mapping.size} bytes")
    if aligned and (offset % _WORD or size % _WORD):
        raise TransportError(f"{size} bytes at {offset} are not whole words")
