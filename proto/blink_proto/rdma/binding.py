"""The few verbs that both programs use: what a binding to the machine's libibverbs has to offer, and which there are.

Two packages can be behind this: Debian's and DOCA's own `pyverbs` (`with_pyverbs`) and PyPI's `ibverbs`
(`with_ibverbs`). One class for each thing that has to be closed. Nothing here waits: completions are polled, and the
completion channel's descriptor does not block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple, Protocol

from blink_proto.rdma.wire import Endpoint

BINDINGS = ("pyverbs", "ibverbs")
"""In the order of preference: about as fast, but pyverbs fits the machine's own libibverbs and has memory windows."""
AUTO = "auto"
BINDING_CHOICES = (AUTO, *BINDINGS)

PORT = 1
INLINE_BYTES = 64
READS_AT_ONCE = 8
"""RDMA reads that one queue pair has on the wire; both ends must agree. Every RoCE adapter allows 16."""
ACK_TIMEOUT = 14
RETRIES = 6
"""An unanswered request is sent again after 4.096 µs · 2^14 = 67 ms or up to four times that, so a peer that is gone is
noticed after half a second to two. Soft-RoCE takes 7 retries, the most, for retries without end."""
HOP_LIMIT = 64
MOST_COMPLETIONS = 32
"""Taken by one poll."""
_REORDERING = ("MLX5_RELAXED_PACKET_ORDERING_ON",)


class RdmaError(Exception):
    """The device or the library refuses; the message names no key, address or queue pair."""


class BindingMissingError(RdmaError):
    """The package, or the libibverbs that it needs, is not there."""


class Access(IntFlag):
    """Rights to memory, as libibverbs numbers them. Relaxed ordering is never among them."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    BIND_WINDOWS = 16
    """Memory windows may be bound over the region."""


class Region(Protocol):
    """Registered memory."""

    local_key: int
    key: int
    address: int
    """By which peers reach its first byte."""

    def close(self) -> None:
        """From its return on the keys are void."""


class MemoryWindow(Protocol):
    """Gives the peer of one queue pair rights to a region that has none itself (type 2 of the verbs specification)."""

    key: int
    """By which the peer names it; another one after each `Bind`."""

    def close(self) -> None:
        """From its return on the key is void."""


class Write(NamedTuple):
    """`size` bytes at `local` go to `remote`. `inline`: they may change as soon as the work is posted."""

    local: int
    local_key: int
    size: int
    remote: int
    remote_key: int
    inline: bool = False

    def __repr__(self) -> str:
        return f"Write(size={self.size}, redacted)"


class Read(NamedTuple):
    """`size` bytes at `remote` come to `local`."""

    local: int
    local_key: int
    size: int
    remote: int
    remote_key: int

    def __repr__(self) -> str:
        return f"Read(size={self.size}, redacted)"


class Bind(NamedTuple):
    """Opens a window, which is closed, over the first `size` bytes of a region to the peer."""

    window: MemoryWindow
    region: Region
    size: int
    access: Access


class Invalidate(NamedTuple):
    """Shuts a window: from the completion on its key is void."""

    window: MemoryWindow


Work = Write | Read | Bind | Invalidate


@dataclass(frozen=True, slots=True)
class Done:
    """A completion: the number that was posted with the work, and an empty string or what went wrong."""

    number: int
    fault: str


class QueuePair(Protocol):
    """A reliable connection; see `Domain.queue_pair`."""

    descriptor: int
    """Of the completion channel."""
    endpoint: Endpoint

    def connect(self, peer: Endpoint, access: Access) -> None:
        """Connects with a peer, which may then do what `access` says with memory that is open to it.

        Raises:
            RdmaError: there is no way to the peer.
        """

    def post(self, works: Sequence[Work], number: int) -> None:
        """Starts pieces of work in this order; the last one's completion has the number, and so has every failed one.

        Raises:
            RdmaError: the queue is full, or the connection is no more.
        """

    def poll(self) -> list[Done]:
        """Completions since the last call, in order.

        Raises:
            RdmaError: the completion queue is broken.
        """

    def arm(self) -> None:
        """Makes the descriptor readable at the next completion."""

    def take_event(self) -> bool:
        """Makes the descriptor unreadable; whether it was readable."""

    def close(self) -> None:
        """Ends the connection."""


class Shared(NamedTuple):
    """What another process needs to register its own memory in a domain: the device's open file, which the domain
    lives in, and the domain's number there.
    """

    descriptor: int
    domain: int

    def __repr__(self) -> str:
        return "Shared(redacted)"


class Domain(Protocol):
    """A protection domain: what is registered in one is of no use to queue pairs of another."""

    def register(self, address: int, size: int, access: Access) -> Region:
        """Memory of this process.

        Raises:
            RdmaError: the memory cannot be pinned.
        """

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> Region:
        """Memory behind a dma-buf, from `offset` of it. `base` is the address by which peers shall reach it; the
        region's own address is the one by which they do, as not every binding lets it be chosen.

        Raises:
            RdmaError: the device cannot (Soft-RoCE cannot).
        """

    def adopt(self, register: Callable[[Shared], Region]) -> Region:
        """Memory of another process, which registers it itself (see `uverbs`) and is asked to by `register`.

        Raises:
            RdmaError: the binding does not tell where the domain is, or what `register` raises.
        """

    def window(self) -> MemoryWindow:
        """A window that is bound to nothing yet.

        Raises:
            RdmaError: see `Device.no_windows`, or there are no more.
        """

    def queue_pair(self, depth: int) -> QueuePair:
        """A reliable connection that may have `depth` pieces of work under way.

        Raises:
            RdmaError: the device has no more, or not that deep.
        """

    def close(self) -> None:
        """After its regions, windows and queue pairs."""


class Device(Protocol):
    """An open RDMA device with the address that it speaks from."""

    name: str
    binding: str
    no_windows: str
    """Why it has no memory windows of type 2; empty where it has."""

    def domain(self) -> Domain:
        """A new one."""

    def close(self) -> None:
        """After everything that was made on it."""


def refuse_reordering() -> None:
    """Refuses settings of the process that let writes pass each other, so that commit words could come before payloads.

    Raises:
        RdmaError: one of them is on.
    """
    for name in _REORDERING:
        if os.environ.get(name, "0") not in ("", "0"):
            raise RdmaError(f"{name} is set: relaxed ordering breaks the arena's contract; unset it")


def open_device(name: str, address: str, bindings: Sequence[str] = BINDINGS) -> Device:
    """Opens a device by the first of these bindings that is installed.

    Args:
        name: of the device; empty: the one that has the address.
        address: IP address of its interface.

    Raises:
        RdmaError: no binding is installed, there is no such device, or its port is down.
    """
    refuse_reordering()
    missing = []
    for binding in bindings:
        if binding not in OPENERS:
            raise RdmaError(f"there is no binding to verbs named {binding!r}")
        try:
            return OPENERS[binding](name, address)
        except BindingMissingError as error:
            missing.append(str(error))
    raise BindingMissingError("; ".join(missing))


def _by_ibverbs(name: str, address: str) -> Device:
    from blink_proto.rdma.with_ibverbs import IbverbsDevice

    return IbverbsDevice(name, address)


def _by_pyverbs(name: str, address: str) -> Device:
    from blink_proto.rdma.with_pyverbs import PyverbsDevice

    return PyverbsDevice(name, address)


OPENERS: dict[str, Callable[[str, str], Device]] = {"ibverbs": _by_ibverbs, "pyverbs": _by_pyverbs}
"""By binding; each raises what `open_device` does."""
