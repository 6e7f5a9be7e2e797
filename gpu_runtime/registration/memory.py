"""The arena's memory as RDMA devices can register it."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from gpu_runtime.shared_arena import SharedArena


class Part(NamedTuple):
    """A range of one of the arena's regions."""

    inbound: bool
    offset: int
    size: int


Access = TypeVar("Access", contravariant=True)
Region = TypeVar("Region", covariant=True)


class Domain(Protocol[Access, Region]):
    """What registers memory with one device, for one front end: a `blink_proto.rdma` domain, or one of DOCA's."""

    def register(self, address: int, size: int, access: Access) -> Region:
        """Memory of this process, or what the kernel takes for it."""

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> Region:
        """`size` bytes at `offset` of a dma-buf; peers call the first one `base`."""


class ArenaMemory(Protocol):
    """Where an arena lies."""

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """Registers a part.

        Raises:
            RdmaError: the device refuses, or the memory cannot be had.
        """


class HostMemory:
    """The arena in shared memory of this host: the soft GPU's."""

    def __init__(self, shared: SharedArena) -> None:
        self._arena = shared

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """Pins the pages."""
        region = self._arena.inbound if part.inbound else self._arena.outbound
        return domain.register(int(region.ctypes.data) + part.offset, part.size, access)
