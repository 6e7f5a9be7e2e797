"""The arena's memory as RDMA devices can register it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from blink_proto.rdma.binding import Access, Domain, Region
from gpu_runtime.shared_arena import SharedArena


class Part(NamedTuple):
    """A range of one of the arena's regions."""

    inbound: bool
    offset: int
    size: int


class ArenaMemory(Protocol):
    """Where an arena lies."""

    def register(self, domain: Domain, part: Part, access: Access) -> Region:
        """Registers a part.

        Raises:
            RdmaError: the device refuses.
        """


class HostMemory:
    """The arena in shared memory of this host: the soft GPU's."""

    def __init__(self, shared: SharedArena) -> None:
        self._arena = shared

    def register(self, domain: Domain, part: Part, access: Access) -> Region:
        """Pins the pages."""
        region = self._arena.inbound if part.inbound else self._arena.outbound
        return domain.register(int(region.ctypes.data) + part.offset, part.size, access)
