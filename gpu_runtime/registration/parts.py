"""Parts of the arena's memory, and what registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from blink_proto.rdma import binding
from blink_proto.rdma.binding import RdmaError, Shared


class Part(NamedTuple):
    """A range of one of the arena's regions."""

    inbound: bool
    offset: int
    size: int

    def check(self, whole: int) -> None:
        """Raises:
        RdmaError: it does not lie within a region of that many bytes.
        """
        if self.offset < 0 or self.size < 1 or self.offset + self.size > whole:
            raise RdmaError("a part that does not lie within the arena")


Access = TypeVar("Access", contravariant=True)
Region = TypeVar("Region", covariant=True)


class Domain(Protocol[Access, Region]):
    """What registers memory with one device, for one front end: a `blink_proto.rdma` domain, or one of DOCA's."""

    def register(self, address: int, size: int, access: Access) -> Region:
        """Memory of this process."""

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> Region:
        """`size` bytes at `offset` of a dma-buf; peers call the first one `base`."""

    def adopt(self, register: Callable[[Shared], binding.Region]) -> Region:
        """Memory of another process, which registers it itself; see `blink_proto.rdma.binding.Domain`."""


class ArenaMemory(Protocol):
    """Where an arena lies."""

    @property
    def no_windows(self) -> str:
        """Why memory windows cannot be bound over it; empty where the device has to try."""

    def register(self, domain: Domain[Access, Region], part: Part, access: Access) -> Region:
        """Registers a part.

        Raises:
            RdmaError: the device refuses, or the memory cannot be had.
        """
