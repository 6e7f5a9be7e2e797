"""A binding to verbs that is played within this process, with numbers that are easily found wherever they are shown.

It has protection domains, regions, memory windows of type 2 and reliable connections; work is done when it is posted.
What cannot be played is another process: memory is reached by its address.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from blink_proto.rdma.binding import (
    INLINE_BYTES,
    Access,
    Bind,
    Done,
    Invalidate,
    MemoryWindow,
    RdmaError,
    Read,
    Region,
    Work,
    Write,
)
from blink_proto.rdma.gids import gid_of
from blink_proto.rdma.wire import Endpoint

ADDRESS = "10.86.71.53"
NO_PEER, REFUSED = "transport retry counter exceeded", "remote access error"
_pairs = itertools.count(0x5EC201, 7)
_packets = itertools.count(0xA11CE1, 11)
_keys = itertools.count(0xB0BCA701, 257)
_lock = threading.Lock()


class PlayedDevice:
    """See `Device`. All of them are one device."""

    name = "played0"
    binding = "played"
    no_windows = ""
    pairs: ClassVar[dict[int, PlayedPair]] = {}
    openings: ClassVar[dict[int, PlayedRegion | PlayedWindow]] = {}
    """What peers may reach, by key."""
    domains: ClassVar[set[PlayedDomain]] = set()
    opened: ClassVar[int] = 0

    def __init__(self, name: str, address: str) -> None:
        if name not in ("", self.name) or address != ADDRESS:
            raise RdmaError(f"no RDMA device has the address {address}")
        PlayedDevice.opened += 1

    def domain(self) -> PlayedDomain:
        return PlayedDomain()

    def close(self) -> None:
        PlayedDevice.opened -= 1


class PlayedDeviceWithoutWindows(PlayedDevice):
    no_windows = "the device played0 has no memory windows of type 2"


@dataclass(eq=False)
class PlayedRegion:
    domain: PlayedDomain
    address: int
    size: int
    access: Access
    key: int = field(default_factory=lambda: next(_keys))

    def __post_init__(self) -> None:
        self.local_key = self.key
        PlayedDevice.openings[self.key] = self

    def gives(self, pair: PlayedPair, access: Access, start: int, size: int) -> bool:
        within = self.address <= start and start + size <= self.address + self.size
        return pair.domain is self.domain and access in self.access and within

    def close(self) -> None:
        del PlayedDevice.openings[self.key]

    def __repr__(self) -> str:
        return "Region(redacted)"


class PlayedWindow:
    def __init__(self, domain: PlayedDomain) -> None:
        self.domain, self.key = domain, next(_keys)
        self.bound: tuple[PlayedRegion, PlayedPair, int, Access] | None = None

    def bind(self, pair: PlayedPair, region: Region, size: int, access: Access) -> bool:
        """Whether it could be."""
        assert isinstance(region, PlayedRegion)
        allowed = Access.BIND_WINDOWS in region.access and region.domain is self.domain is pair.domain
        writable = Access.REMOTE_WRITE not in access or Access.LOCAL_WRITE in region.access
        if self.bound or not allowed or not writable or not 0 < size <= region.size:
            return False
        self.key, self.bound = next(_keys), (region, pair, size, access)
        PlayedDevice.openings[self.key] = self
        return True

    def gives(self, pair: PlayedPair, access: Access, start: int, size: int) -> bool:
        if self.bound is None:
            return False
        region, owner, length, rights = self.bound
        within = region.address <= start and start + size <= region.address + length
        return pair is owner and access in rights and within

    def invalidate(self) -> None:
        self.bound = None
        PlayedDevice.openings.pop(self.key, None)

    def close(self) -> None:
        self.invalidate()

    def __repr__(self) -> str:
        return "MemoryWindow(redacted)"


class PlayedDomain:
    """See `Domain`."""

    def __init__(self) -> None:
        PlayedDevice.domains.add(self)

    def register(self, address: int, size: int, access: Access) -> Region:
        return PlayedRegion(self, address, size, access)

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> Region:
        raise RdmaError("no dma-bufs are played")

    def window(self) -> MemoryWindow:
        return PlayedWindow(self)

    def queue_pair(self, depth: int) -> PlayedPair:
        return PlayedPair(self, depth)

    def close(self) -> None:
        if any(one.domain is self for one in PlayedDevice.openings.values()):
            raise RdmaError("dealloc_pd failed (Device or resource busy)")
        PlayedDevice.domains.discard(self)


class PlayedPair:
    """See `QueuePair`."""

    def __init__(self, domain: PlayedDomain, depth: int) -> None:
        self.domain, self._depth = domain, depth
        self.endpoint = Endpoint(next(_pairs), next(_packets), gid_of(ADDRESS), 0, 5)
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self._peer: Endpoint | None = None
        self._done: list[Done] = []
        self._armed = self._failed = False
        self.access = Access(0)
        PlayedDevice.pairs[self.endpoint.queue_pair] = self

    def connect(self, peer: Endpoint, access: Access) -> None:
        self._peer, self.access = peer, access

    def fail(self) -> None:
        """Takes no more work."""
        self._failed = True

    def post(self, works: Sequence[Work], number: int) -> None:
        if self.descriptor < 0 or len(works) > self._depth:
            raise RdmaError("post_send failed")
        with _lock:
            for i, work in enumerate(works):
                fault = "work request flushed" if self._failed else self._do(work)
                self._failed = self._failed or bool(fault)
                if fault or i == len(works) - 1:
                    self._done.append(Done(number, fault))
        if works and self._armed:
            self._armed = False
            os.eventfd_write(self.descriptor, 1)

    def _do(self, work: Work) -> str:
        if isinstance(work, Bind):
            assert isinstance(work.window, PlayedWindow)
            bound = work.window.bind(self, work.region, work.size, work.access)
            return "" if bound else "memory window bind error"
        if isinstance(work, Invalidate):
            assert isinstance(work.window, PlayedWindow)
            work.window.invalidate()
            return ""
        return self._move(work)

    def _move(self, work: Write | Read) -> str:
        peer = PlayedDevice.pairs.get(self._peer.queue_pair) if self._peer else None
        if peer is None or peer._failed or peer._peer != self.endpoint:
            return NO_PEER
        writes = isinstance(work, Write)
        wanted = Access.REMOTE_WRITE if writes else Access.REMOTE_READ
        opening = PlayedDevice.openings.get(work.remote_key)
        if opening is None or wanted not in peer.access or not opening.gives(peer, wanted, work.remote, work.size):
            peer._failed = True
            return REFUSED
        assert not (isinstance(work, Write) and work.inline) or work.size <= INLINE_BYTES
        source, target = (work.local, work.remote) if writes else (work.remote, work.local)
        ctypes.memmove(target, source, work.size)
        return ""

    def poll(self) -> list[Done]:
        if self.descriptor < 0:
            raise RdmaError("the connection was closed")
        with _lock:
            done, self._done = self._done, []
        return done

    def arm(self) -> None:
        self._armed = True

    def take_event(self) -> bool:
        try:
            return os.eventfd_read(self.descriptor) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        if self.descriptor >= 0:
            del PlayedDevice.pairs[self.endpoint.queue_pair]
            os.close(self.descriptor)
            self.descriptor = -1

    def __repr__(self) -> str:
        return "QueuePair(redacted)"
