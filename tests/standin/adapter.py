"""An RDMA adapter without one: it maps what is registered, and front ends reach that as over the wire.

Rights and bounds are checked as a real one does; what is not allowed gets nowhere and is told as an error.
"""

from __future__ import annotations

import itertools
import mmap
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blink_proto.rdma.binding import Access, Shared
from blink_proto.rdma.wire import Answer, Endpoint, Window
from tests.standin.table import INBOUND, OUTBOUND, Table

_NUMBERS = itertools.count(1)


class RefusedError(Exception):
    """A remote access error."""


@dataclass(eq=False)
class StandinRegion:
    """Registered memory, and what peers may do with it."""

    adapter: Adapter
    memory: mmap.mmap
    offset: int
    size: int
    address: int
    access: Access
    key: int = field(default_factory=lambda: secrets.randbits(32))
    local_key: int = 0

    def close(self) -> None:
        self.adapter.regions.pop(self.key)
        self.memory.close()


@dataclass(eq=False)
class AdoptedRegion(StandinRegion):
    """Memory that its owner has registered; see `table`."""

    owned: Any = None

    def close(self) -> None:
        self.owned.close()
        super().close()


class StandinDomain:
    """See `blink_proto.rdma.binding.Domain`."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def register(self, address: int, size: int, access: Access) -> Any:
        raise AssertionError("device memory is never registered by its address")

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> StandinRegion:
        made = StandinRegion(self._adapter, mmap.mmap(descriptor, 0), offset, size, base, access)
        self._adapter.regions[made.key] = made
        self._adapter.registered.append(made)
        return made

    def adopt(self, register: Callable[[Shared], Any]) -> AdoptedRegion:
        adapter = self._adapter
        assert adapter.table is not None
        owned = register(Shared(adapter.table.descriptor, 1))
        (row,) = [row for row in adapter.table.rows() if row.key == owned.key]
        assert row.live
        inbound = row.address < OUTBOUND
        name, base = ("inbound", INBOUND) if inbound else ("outbound", OUTBOUND)
        with (adapter.folder / name).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        where = (row.address - base, row.size, row.address, Access(row.access), row.key)
        made = AdoptedRegion(adapter, memory, *where, owned=owned)
        adapter.regions[made.key] = made
        adapter.registered.append(made)
        return made

    def queue_pair(self, depth: int) -> StandinPair:
        return StandinPair()

    def close(self) -> None:
        pass


class StandinPair:
    """A connection that needs nothing: the front ends of the tests go by keys."""

    def __init__(self) -> None:
        self.endpoint = Endpoint(next(_NUMBERS), 1, bytes(16), 0, 3)

    def connect(self, peer: Endpoint, access: Access) -> None:
        pass

    def close(self) -> None:
        pass


class Adapter:
    """See `blink_proto.rdma.binding.Device`, and the wire's end for front ends."""

    name, binding = "standin0", "standin"
    no_windows = "a stand-in has none"

    def __init__(self, folder: Path = Path(), table: Table | None = None) -> None:
        """`folder` has the chain's memory where that registers it itself, in the table."""
        self.folder, self.table = folder, table
        self.regions: dict[int, StandinRegion] = {}
        self.registered: list[StandinRegion] = []
        """All that ever were."""
        self.closed = False

    def domain(self) -> StandinDomain:
        return StandinDomain(self)

    def close(self) -> None:
        assert not self.regions, "closed with memory still registered"
        self.closed = True

    def _reach(self, key: int, address: int, size: int, right: Access) -> tuple[mmap.mmap, int]:
        region = self.regions.get(key)
        if region is None or not region.access & right:
            raise RefusedError("no such right")
        at = address - region.address
        if at < 0 or at + size > region.size:
            raise RefusedError("out of bounds")
        return region.memory, region.offset + at

    def write(self, key: int, address: int, payload: bytes) -> None:
        """An RDMA write."""
        memory, at = self._reach(key, address, len(payload), Access.REMOTE_WRITE)
        memory[at : at + len(payload)] = payload

    def read(self, key: int, address: int, size: int) -> bytes:
        """An RDMA read."""
        memory, at = self._reach(key, address, size, Access.REMOTE_READ)
        return memory[at : at + size]


class Peer:
    """A front end's end: reaches what a session's answer gives it."""

    def __init__(self, adapter: Adapter, answer: bytes) -> None:
        self._adapter, self.answer = adapter, Answer.from_bytes(answer)

    def put(self, offset: int, payload: bytes) -> None:
        """Into the inbound region."""
        window = _covering(self.answer.inbound, offset, len(payload))
        self._adapter.write(window.key, window.address + offset - window.offset, payload)

    def get(self, offset: int, size: int) -> bytes:
        """From the outbound region."""
        window = _covering(self.answer.outbound, offset, size)
        return self._adapter.read(window.key, window.address + offset - window.offset, size)


def _covering(windows: Sequence[Window], offset: int, size: int) -> Window:
    found = next((one for one in windows if one.covers(offset, size)), None)
    if found is None:
        raise RefusedError("no window covers that")
    return found
