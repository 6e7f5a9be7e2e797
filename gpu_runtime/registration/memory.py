"""The arena's memory as RDMA devices can register it."""

from __future__ import annotations

import socket
from typing import NamedTuple, Protocol, TypeVar

from blink_proto import arena
from blink_proto.rdma.binding import RdmaError
from gpu_runtime.registration.handover import Exported, receive_regions
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
        """Memory of this process."""

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


class DmabufMemory:
    """The arena in a CUDA device's memory, which the chain's process owns and hands over.

    Both dma-bufs are held until `close`, and registered part by part, so that a key reaches no further than its part.
    The address by which peers reach a part is said explicitly, never assumed: it is the device's, though any would do.
    """

    def __init__(self, sizes: arena.Sizes) -> None:
        self._needed = (arena.InboundLayout(sizes).total_bytes, arena.OutboundLayout(sizes).total_bytes)
        self._connection, self.chain_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._regions: dict[bool, Exported] = {}

    def receive(self) -> None:
        """Takes what the chain's process has sent; to be called when it is ready.

        Raises:
            RegistrationError: it has sent nothing, or what cannot be.
        """
        self.chain_end.close()  # the chain's process has its own
        inbound, outbound = receive_regions(self._connection, self._needed)
        self._regions = {True: inbound, False: outbound}

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """Maps the part for the domain's device."""
        region = self._regions.get(part.inbound)
        if region is None:
            raise RdmaError("the arena's memory is not there")
        if part.offset < 0 or part.size < 1 or part.offset + part.size > self._needed[0 if part.inbound else 1]:
            raise RdmaError("a part that does not lie within the arena")
        at = region.offset + part.offset
        return domain.register_dmabuf(region.descriptor, at, part.size, region.address + part.offset, access)

    def close(self) -> None:
        """After all registrations; the chain's process may give the memory up then. May be called again."""
        for region in self._regions.values():
            region.close()
        self._regions = {}
        self.chain_end.close()
        self._connection.close()
