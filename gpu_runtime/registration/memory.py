"""The arena's memory as RDMA devices can register it: this host's, or a CUDA device's, in one of two ways."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping

from blink_proto import arena
from blink_proto.rdma.binding import RdmaError
from gpu_runtime.registration.handover import Exported, RegionAddress, receive_regions
from gpu_runtime.registration.parts import Access, ArenaMemory, Domain, Part, Region
from gpu_runtime.registration.peermem import Asker, PeermemMemory
from gpu_runtime.registration.ways import DMA_BUF, PEERMEM
from gpu_runtime.shared_arena import SharedArena

log = logging.getLogger(__name__)


class HostMemory:
    """The arena in shared memory of this host: the soft GPU's."""

    no_windows = ""

    def __init__(self, shared: SharedArena) -> None:
        self._arena = shared

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """Pins the pages."""
        region = self._arena.inbound if part.inbound else self._arena.outbound
        return domain.register(int(region.ctypes.data) + part.offset, part.size, access)


class DmabufMemory:
    """The arena in a CUDA device's memory, by dma-bufs.

    They are held until `close`, and registered part by part, so that a key reaches no further than its part.
    The address by which peers reach a part is said explicitly, never assumed: it is the device's, though any would do.
    """

    no_windows = ""

    def __init__(self, regions: Mapping[bool, Exported], needed: Mapping[bool, int]) -> None:
        self._regions, self._needed = regions, needed

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """Maps the part for the domain's device."""
        part.check(self._needed[part.inbound])
        region = self._regions[part.inbound]
        at = region.offset + part.offset
        return domain.register_dmabuf(region.descriptor, at, part.size, region.address + part.offset, access)

    def close(self) -> None:
        """After all registrations."""
        for region in self._regions.values():
            region.close()


class LentMemory:
    """The arena in a CUDA device's memory, which the chain's process owns and lends in the way that it chooses."""

    def __init__(self, sizes: arena.Sizes) -> None:
        inbound, outbound = arena.InboundLayout(sizes).total_bytes, arena.OutboundLayout(sizes).total_bytes
        self._needed = {True: inbound, False: outbound}
        self._connection, self.chain_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lent: DmabufMemory | PeermemMemory | None = None

    def receive(self, is_over: Callable[[], bool]) -> None:
        """Takes what the chain's process has sent; to be called when it is ready.

        Args:
            is_over: whether that process is gone.

        Raises:
            RegistrationError: it has sent nothing, or what cannot be.
        """
        self.chain_end.close()  # the chain's process has its own
        inbound, outbound = receive_regions(self._connection, (self._needed[True], self._needed[False]))
        if isinstance(inbound, RegionAddress) and isinstance(outbound, RegionAddress):
            asker = Asker(self._connection, is_over)
            self._lent = PeermemMemory(asker, {True: inbound, False: outbound}, self._needed)
        elif isinstance(inbound, Exported) and isinstance(outbound, Exported):
            self._lent = DmabufMemory({True: inbound, False: outbound}, self._needed)
        log.info("RDMA devices get the GPU's memory by %s", self.way)

    @property
    def way(self) -> str:
        """`DMA_BUF` or `PEERMEM`; empty before `receive` and after `close`."""
        if self._lent is None:
            return ""
        return PEERMEM if isinstance(self._lent, PeermemMemory) else DMA_BUF

    @property
    def no_windows(self) -> str:
        """See `ArenaMemory`."""
        return "" if self._lent is None else self._lent.no_windows

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """See `ArenaMemory`."""
        if self._lent is None:
            raise RdmaError("the arena's memory is not there")
        return self._lent.register(domain, part, access)

    def close(self) -> None:
        """After all registrations; the chain's process may give the memory up then. May be called again."""
        if isinstance(self._lent, DmabufMemory):
            self._lent.close()
        self._lent = None
        self.chain_end.close()
        self._connection.close()


__all__ = ["ArenaMemory", "DmabufMemory", "HostMemory", "LentMemory", "Part"]
