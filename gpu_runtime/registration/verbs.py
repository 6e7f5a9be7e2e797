"""Registration for the `verbs` transport: a queue pair and the least rights to memory, for each front end.

Of the inbound region a front end may write its own channels, of the outbound region read its own channels and the first
page (header and telemetry). Its protection domain has no other queue pair in it, so its keys are of no use to another
front end's, and every session has new ones. See `grants` for the two ways in which they are given.
"""

from __future__ import annotations

import logging
import time

from blink_proto import arena
from blink_proto.rdma.binding import Device, RdmaError, open_device
from blink_proto.rdma.choice import RdmaChoice
from blink_proto.rdma.wire import Answer, Endpoint, WireError
from gpu_runtime.registration.base import NotNowError, RegistrationError
from gpu_runtime.registration.grants import READABLE, WRITABLE, Grant, Ground, RegionGrant, Wanted, WindowGrant
from gpu_runtime.registration.parts import ArenaMemory, Part
from gpu_runtime.registration.peermem import OwnerError

log = logging.getLogger(__name__)

LINGER_SECONDS = 5.0
"""How long a revoked queue pair stays at least, so that its peer is told at once that its keys are void: until then and
the next session, or until its channels go to another session by memory windows.
"""


class VerbsRegistration:
    """See `Registration`."""

    def __init__(self, grant: Grant, answer: Answer) -> None:
        self._grant = grant
        self._answer = answer

    @property
    def answer(self) -> bytes:
        """Endpoint and windows."""
        return self._answer.to_bytes()

    def revoke(self) -> None:
        """Voids the keys; see `Registration`."""
        try:
            self._grant.void_keys()
        except RdmaError as error:
            raise RegistrationError(str(error)) from error

    def __repr__(self) -> str:
        return "VerbsRegistration(redacted)"


class VerbsRegistrar:
    """See `Registrar`.

    Args:
        memory: the arena's.

    Raises:
        RegistrationError: there is no such device, or nothing to reach it by.
    """

    def __init__(self, memory: ArenaMemory, sizes: arena.Sizes, rdma: RdmaChoice) -> None:
        self._memory, self._sizes = memory, sizes
        self._device = open_adapter(rdma)
        self._grants: list[Grant] = []
        self._grounds: dict[tuple[int, ...], Ground] = {}
        self._retired: list[Ground] = []
        """Of channels that have others, and not given back yet."""
        self._has_windows = not self._device.no_windows
        log.info("verbs by %s on %s", self._device.binding, self._device.name)
        if not self._has_windows:
            self._do_without_windows(self._device.no_windows)

    def _do_without_windows(self, reason: str) -> None:
        self._has_windows = False
        log.warning("no memory windows, so each session has memory regions of its own: %s", reason)

    def register(self, offer: bytes, channels: tuple[int, ...]) -> VerbsRegistration:
        """Connects a queue pair of this front end's own."""
        self._end_revoked(time.monotonic() - LINGER_SECONDS)
        self._close_retired()
        inbound, outbound = inbound_parts(self._sizes, channels), outbound_parts(self._sizes, channels)
        wanted = [Wanted(one, WRITABLE) for one in inbound] + [Wanted(one, READABLE) for one in outbound]
        try:
            grant = self._grant(Endpoint.from_bytes(offer), channels, wanted)
        except OwnerError as error:
            raise NotNowError(str(error)) from error
        except (WireError, RdmaError) as error:
            raise RegistrationError(str(error)) from error
        windows = grant.windows
        answer = Answer(grant.pair.endpoint, windows[: len(inbound)], windows[len(inbound) :])
        return VerbsRegistration(grant, answer)

    def _grant(self, peer: Endpoint, channels: tuple[int, ...], wanted: list[Wanted]) -> Grant:
        if self._has_windows and self._memory.no_windows:
            self._do_without_windows(self._memory.no_windows)
        ground = self._ground(channels, wanted) if self._has_windows else None
        made: Grant
        made = WindowGrant(ground, wanted) if ground else RegionGrant(self._device, self._memory, wanted)
        self._grants.append(made)
        try:
            made.let_in(peer)
        except RdmaError:
            self._close(made)
            raise
        return made

    def _ground(self, channels: tuple[int, ...], wanted: list[Wanted]) -> Ground | None:
        """The channels' own, with nobody on it; None where windows cannot be bound over this memory."""
        found = self._grounds.get(channels)
        if found is not None:
            self._end_revoked(time.monotonic(), found)
            if not self._is_held(found):
                return found
        self._retire(channels)
        try:
            made = Ground(self._device, self._memory, wanted)
        except RdmaError as error:
            self._do_without_windows(str(error))
            return None
        self._grounds[channels] = made
        return made

    def _retire(self, channels: tuple[int, ...]) -> None:
        """What there is for one of these channels."""
        for other in [one for one in self._grounds if set(one) & set(channels)]:
            ground = self._grounds.pop(other)
            self._retired.append(ground)
            self._end_revoked(time.monotonic(), ground)
        self._close_retired()

    def _is_held(self, ground: Ground) -> bool:
        return any(one.ground is ground for one in self._grants)

    def _close_retired(self) -> None:
        for ground in [one for one in self._retired if not self._is_held(one)]:
            try:
                ground.close()
            except RdmaError as error:
                log.warning("memory of channels stays registered, with nobody connected to it: %s", error)
            else:
                self._retired.remove(ground)

    def _end_revoked(self, before: float, ground: Ground | None = None) -> None:
        """Those that were before that time, everywhere or on one ground."""
        over = [one for one in self._grants if one.revoked is not None and one.revoked <= before]
        for one in over:
            if ground is None or one.ground is ground:
                self._close(one)

    def _close(self, grant: Grant) -> None:
        """Now, or if its memory is not given back, at a later try."""
        try:
            grant.close()
        except RdmaError as error:
            log.warning("what a session had of the RDMA device is not given back yet: %s", error)
        else:
            self._grants.remove(grant)

    def close(self) -> None:
        """Ends with the arena. Memory that is not given back keeps the device open."""
        for one in list(self._grants):
            self._close(one)
        self._retired += self._grounds.values()
        self._grounds.clear()
        self._close_retired()
        if self._grants or self._retired:
            log.error("the RDMA device %s stays open: memory is registered with it", self._device.name)
            return
        try:
            self._device.close()
        except RdmaError as error:
            log.error("the RDMA device %s stays open: %s", self._device.name, error)


def open_adapter(rdma: RdmaChoice) -> Device:
    """The device.

    Raises:
        RegistrationError: there is none, nothing to reach it by, or its port is down.
    """
    try:
        return open_device(rdma.device, rdma.address, rdma.bindings)
    except RdmaError as error:
        raise RegistrationError(str(error)) from error


def inbound_parts(sizes: arena.Sizes, channels: tuple[int, ...]) -> list[Part]:
    """The channels of the inbound region; not the bell, which only transports through host memory ring."""
    layout = arena.InboundLayout(sizes)
    return [Part(True, layout.channel_offset(one), layout.channel_bytes) for one in channels]


def outbound_parts(sizes: arena.Sizes, channels: tuple[int, ...]) -> list[Part]:
    """The page with header and telemetry, and the channels of the outbound region."""
    layout = arena.OutboundLayout(sizes)
    first = Part(False, 0, layout.channel_offset(0))
    return [first, *(Part(False, layout.channel_offset(one), layout.channel_bytes) for one in channels)]
