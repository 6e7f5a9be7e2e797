"""What one session of a front end holds of an RDMA device, in either of two ways, and how it is voided.

Each has a queue pair of its own, in a protection domain that no other queue pair is in.

- `RegionGrant`: memory is registered for the session, with the rights that it gives. Revoked by deregistering, or where
  the memory's owner does not do that in time (nvidia-peermem), by ending the connection.
- `WindowGrant`: memory stays registered for the channels, without any right for peers (`Ground`); a session's memory
  windows of type 2 give its own queue pair rights to it. Revoked by a local invalidate; nothing is pinned anew. The
  memory and its domain go over to a later session, when the queue pair of the one before is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from blink_proto.rdma.binding import (
    Access,
    Bind,
    Device,
    Domain,
    Invalidate,
    MemoryWindow,
    QueuePair,
    RdmaError,
    Region,
    Work,
)
from blink_proto.rdma.wire import Endpoint, Window
from gpu_runtime.registration.parts import ArenaMemory, Part

log = logging.getLogger(__name__)

WINDOW_SECONDS = 5.0
"""For binding a session's windows."""
INVALIDATE_SECONDS = 0.5
"""For invalidating them, which no peer takes part in; what takes longer is ended with the windows themselves."""
WRITABLE = Access.LOCAL_WRITE | Access.REMOTE_WRITE
READABLE = Access.REMOTE_READ
_OF_PEERS = Access.REMOTE_WRITE | Access.REMOTE_READ
_ANSWERS = 1
_PAUSE_SECONDS = 0.0002


class Wanted(NamedTuple):
    """A part of the arena, and what a front end may do with it."""

    part: Part
    access: Access


class Grant(Protocol):
    """See the module. `windows` are in the order of what was wanted."""

    pair: QueuePair
    windows: tuple[Window, ...]
    ground: Ground | None
    """What it is a session of, where that outlives it."""
    revoked: float | None
    """Since when."""

    def let_in(self, peer: Endpoint) -> None:
        """Connects with the peer, and opens the memory to it.

        Raises:
            RdmaError: the device refuses, or the memory cannot be had. It is to be closed then.
        """

    def void_keys(self) -> None:
        """From its return on no access through the windows succeeds. The queue pair stays, to say so. May be called
        again.

        Raises:
            RdmaError: it does not return so; what is left is tried at the next call.
        """

    def close(self) -> None:
        """Ends the connection too. May be called again after an error.

        Raises:
            RdmaError: the device keeps something.
        """


class RegionGrant:
    """See the module.

    Raises:
        RdmaError: the device refuses.
    """

    def __init__(self, device: Device, memory: ArenaMemory, wanted: Sequence[Wanted]) -> None:
        self.ground: Ground | None = None
        self.revoked: float | None = None
        self.windows: tuple[Window, ...] = ()
        self._memory, self._wanted = memory, wanted
        self._regions: list[Region] = []
        self._domain = device.domain()
        try:
            self.pair = self._domain.queue_pair(_ANSWERS)
        except RdmaError:
            self._domain.close()
            raise
        self._connected = True

    def let_in(self, peer: Endpoint) -> None:
        """See `Grant`."""
        self.pair.connect(peer, _OF_PEERS)
        self.windows = tuple(map(self._register, self._wanted))

    def _register(self, wanted: Wanted) -> Window:
        region = self._memory.register(self._domain, wanted.part, wanted.access)
        self._regions.append(region)
        return Window(wanted.part.offset, wanted.part.size, region.address, region.key)

    def void_keys(self) -> None:
        """Deregisters the memory. What its owner does not give back nobody reaches any more: the connection is ended,
        and there is no other in the domain.
        """
        self.revoked = self.revoked or time.monotonic()
        try:
            self._deregister()
        except RdmaError as error:
            self._disconnect()
            log.warning("a session's connection was ended, as its memory stays registered: %s", error)

    def close(self) -> None:
        """See `Grant`."""
        self.revoked = self.revoked or time.monotonic()
        self._disconnect()
        self._deregister()
        self._domain.close()

    def _deregister(self) -> None:
        while self._regions:
            self._regions[-1].close()
            self._regions.pop()

    def _disconnect(self) -> None:
        if self._connected:
            self.pair.close()
            self._connected = False


class Ground:
    """The memory of some channels, registered without any right for peers, and the domain that it is registered in.

    Raises:
        RdmaError: the device refuses, or windows cannot be bound over this memory.
    """

    def __init__(self, device: Device, memory: ArenaMemory, wanted: Sequence[Wanted]) -> None:
        self.domain: Domain = device.domain()
        self.regions: list[Region] = []
        try:
            for part, access in wanted:
                own = access & Access.LOCAL_WRITE | Access.BIND_WINDOWS
                self.regions.append(memory.register(self.domain, part, own))
        except RdmaError:
            self.close()
            raise

    def close(self) -> None:
        """After the grants on it. May be called again.

        Raises:
            RdmaError: memory is registered still.
        """
        while self.regions:
            self.regions[-1].close()
            self.regions.pop()
        self.domain.close()


@dataclass(frozen=True)
class _Opened:
    window: MemoryWindow
    wanted: Wanted
    region: Region

    def bind(self) -> Bind:
        """Opens it to the peer."""
        return Bind(self.window, self.region, self.wanted.part.size, self.wanted.access & _OF_PEERS)


class WindowGrant:
    """See the module.

    Raises:
        RdmaError: the device refuses.
    """

    def __init__(self, ground: Ground, wanted: Sequence[Wanted]) -> None:
        self.ground: Ground | None = ground
        self.revoked: float | None = None
        self.windows: tuple[Window, ...] = ()
        self._on, self._wanted = ground, wanted
        self._opened: list[_Opened] = []
        self.pair = ground.domain.queue_pair(len(wanted))

    def let_in(self, peer: Endpoint) -> None:
        """See `Grant`."""
        self.pair.connect(peer, _OF_PEERS)
        for one, region in zip(self._wanted, self._on.regions, strict=True):
            self._opened.append(_Opened(self._on.domain.window(), one, region))
        self._do([one.bind() for one in self._opened], WINDOW_SECONDS)
        self.windows = tuple(
            Window(one.wanted.part.offset, one.wanted.part.size, one.region.address, one.window.key)
            for one in self._opened
        )

    def void_keys(self) -> None:
        """Invalidates the windows. Where the queue pair has failed it takes no more work, and nothing gets through it;
        the windows go in any case.
        """
        is_first, self.revoked = self.revoked is None, self.revoked or time.monotonic()
        if self._opened and is_first:
            with suppress(RdmaError):  # what follows is enough, only slower on some devices
                self._do([Invalidate(one.window) for one in self._opened], INVALIDATE_SECONDS)
        while self._opened:
            self._opened[-1].window.close()
            self._opened.pop()

    def close(self) -> None:
        """See `Grant`."""
        self.void_keys()
        self.pair.close()

    def _do(self, works: list[Work], seconds: float) -> None:
        self.pair.post(works, 1)
        end = time.monotonic() + seconds
        while not (done := self.pair.poll()):
            if time.monotonic() > end:
                raise RdmaError("the device did not change its memory windows in time")
            time.sleep(_PAUSE_SECONDS)
        if done[0].fault:
            raise RdmaError(f"the device refuses to change its memory windows: {done[0].fault}")
