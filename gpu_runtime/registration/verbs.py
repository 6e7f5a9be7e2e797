"""Registration for the `verbs` transport: memory regions with the least rights, and a queue pair, for each front end.

Each registration has a protection domain of its own, so its keys are of no use to another front end's queue pair. Of
the inbound region a front end may write its own channels, of the outbound region read its own channels and the first
page (header and telemetry). Registering anew draws new keys.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from blink_proto import arena
from blink_proto.rdma.binding import Access, Device, Domain, QueuePair, RdmaError, Region
from blink_proto.rdma.wire import Answer, Endpoint, Window, WireError
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.memory import ArenaMemory, Part

LINGER_SECONDS = 5.0
"""How long a revoked queue pair stays, so that its peer is told at once that its keys are void."""
_DEPTH = 1  # it only answers


@dataclass
class _Granted:
    """What one registration holds of the device."""

    domain: Domain
    pair: QueuePair
    regions: list[Region]
    revoked: float | None = None

    def void_keys(self) -> None:
        """Deregisters the memory."""
        for region in self.regions:
            region.close()
        self.regions.clear()
        if self.revoked is None:
            self.revoked = time.monotonic()

    def close(self) -> None:
        """Ends the connection too."""
        self.void_keys()
        self.pair.close()
        self.domain.close()


class VerbsRegistration:
    """See `Registration`."""

    def __init__(self, granted: _Granted, answer: Answer) -> None:
        self._granted = granted
        self._answer = answer

    @property
    def answer(self) -> bytes:
        """Endpoint and windows."""
        return self._answer.to_bytes()

    def revoke(self) -> None:
        """Voids the keys."""
        self._granted.void_keys()

    def __repr__(self) -> str:
        return "VerbsRegistration(redacted)"


class VerbsRegistrar:
    """See `Registrar`.

    Args:
        memory: the arena's.
        device, address: see `Device`.

    Raises:
        RegistrationError: there is no such device.
    """

    def __init__(self, memory: ArenaMemory, sizes: arena.Sizes, device: str, address: str) -> None:
        self._memory, self._sizes = memory, sizes
        try:
            self._device = Device(device, address)
        except RdmaError as error:
            raise RegistrationError(str(error)) from error
        self._granted: list[_Granted] = []

    def register(self, offer: bytes, channels: tuple[int, ...]) -> VerbsRegistration:
        """Connects a queue pair of this front end's own."""
        self._end_revoked(time.monotonic() - LINGER_SECONDS)
        try:
            peer = Endpoint.from_bytes(offer)
            return self._register(peer, channels)
        except (WireError, RdmaError) as error:
            raise RegistrationError(str(error)) from error

    def _register(self, peer: Endpoint, channels: tuple[int, ...]) -> VerbsRegistration:
        domain = self._device.domain()
        granted = _Granted(domain, domain.queue_pair(_DEPTH), [])
        self._granted.append(granted)
        try:
            granted.pair.connect(peer, Access.REMOTE_WRITE | Access.REMOTE_READ)
            writable = Access.LOCAL_WRITE | Access.REMOTE_WRITE
            inbound = [self._window(granted, part, writable) for part in inbound_parts(self._sizes, channels)]
            outbound = [
                self._window(granted, part, Access.REMOTE_READ) for part in outbound_parts(self._sizes, channels)
            ]
        except RdmaError:
            granted.void_keys()
            raise
        return VerbsRegistration(granted, Answer(granted.pair.endpoint, tuple(inbound), tuple(outbound)))

    def _window(self, granted: _Granted, part: Part, access: Access) -> Window:
        region = self._memory.register(granted.domain, part, access)
        granted.regions.append(region)
        return Window(part.offset, part.size, region.address, region.key)

    def _end_revoked(self, before: float) -> None:
        over = [one for one in self._granted if one.revoked is not None and one.revoked <= before]
        for one in over:
            one.close()
        self._granted = [one for one in self._granted if one not in over]

    def close(self) -> None:
        """Ends with the arena."""
        for one in self._granted:
            one.close()
        self._device.close()


def inbound_parts(sizes: arena.Sizes, channels: tuple[int, ...]) -> list[Part]:
    """The channels of the inbound region; not the bell, which only transports through host memory ring."""
    layout = arena.InboundLayout(sizes)
    return [Part(True, layout.channel_offset(one), layout.channel_bytes) for one in channels]


def outbound_parts(sizes: arena.Sizes, channels: tuple[int, ...]) -> list[Part]:
    """The page with header and telemetry, and the channels of the outbound region."""
    layout = arena.OutboundLayout(sizes)
    first = Part(False, 0, layout.channel_offset(0))
    return [first, *(Part(False, layout.channel_offset(one), layout.channel_bytes) for one in channels)]
