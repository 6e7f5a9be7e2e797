"""Registration for the `doca` transport: each front end has a device handle, a connection and memory of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from blink_proto import arena
from blink_proto.doca.blobs import Answer, BlobError, ChannelKeys, Offer
from blink_proto.doca.constants import Access, Status
from blink_proto.doca.context import STOP_SECONDS, RdmaContext
from blink_proto.doca.device import Device
from blink_proto.doca.engine import ProgressEngine
from blink_proto.doca.errors import DocaError, DocaUnavailableError
from blink_proto.doca.library import DocaLibrary, load_doca
from blink_proto.doca.memory import DmaBuf, Mmap, Place
from blink_proto.doca.settings import DocaSettings
from blink_proto.rdma import binding
from blink_proto.rdma.binding import RdmaError, Shared
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.parts import ArenaMemory, Part
from gpu_runtime.registration.ways import NO_DOCA

log = logging.getLogger(__name__)

WRITABLE = Access.LOCAL_READ_WRITE | Access.RDMA_WRITE
READABLE = Access.LOCAL_READ_ONLY | Access.RDMA_READ
AGAIN_SECONDS = 0.2
"""For a context to become idle that has not in its time: nobody else is let in meanwhile."""


class Held:
    """What has to be given back, the last thing first. What fails stays, to be tried again."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, give_back: Callable[[], object]) -> None:
        """By which it is done, or raises a DocaError."""
        self._steps.append(give_back)

    def give_back(self) -> None:
        """A step that fails does not keep the others back.

        Raises:
            DocaError: of the first that failed.
        """
        failed: list[Callable[[], object]] = []
        errors: list[DocaError] = []
        for step in reversed(self._steps):
            try:
                step()
            except DocaError as error:
                failed.insert(0, step)
                errors.append(error)
        self._steps = failed
        if errors:
            raise errors[0]


class DocaDomain:
    """Registers memory with one device; see `Domain`. Remembers what has to be given back."""

    def __init__(self, library: DocaLibrary, device: Device, held: Held) -> None:
        self._library = library
        self._device = device
        self._held = held

    def register(self, address: int, size: int, access: Access) -> Mmap:
        """Memory of this process."""
        return self._keep(Mmap.register(self._library, self._device, Place(address, size), access))

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> Mmap:
        """Of a dma-buf, which may be closed afterwards."""
        there = DmaBuf(descriptor, offset)
        return self._keep(Mmap.register(self._library, self._device, Place(base, size), access, there))

    def adopt(self, register: Callable[[Shared], binding.Region]) -> Mmap:
        """Refuses: a memory map belongs to the process that made it."""
        raise RdmaError(NO_DOCA)

    def _keep(self, memory: Mmap) -> Mmap:
        self._held.add(memory.close)
        return memory


class DocaRegistrar:
    """See `Registrar`.

    Args:
        memory: the arena's; must stay where it is until `close`.

    Raises:
        RegistrationError: DOCA is not installed, or the device cannot be used.
    """

    def __init__(self, memory: ArenaMemory, sizes: arena.Sizes, settings: DocaSettings) -> None:
        self._memory = memory
        self._sizes = sizes
        self._settings = settings
        self._library = open_once(settings)  # better known now than with a front end

    def register(self, offer: bytes, channels: tuple[int, ...]) -> DocaRegistration:
        """Exports the channels' memory and connects to the front end."""
        try:
            peer = Offer.decode(offer)
        except BlobError as error:
            raise RegistrationError(f"the offer is not one of the doca transport: {error}") from error
        exports = Exports(self._memory, self._sizes, channels)
        return _or_refuse(lambda: DocaRegistration(self._library, self._settings, peer, exports))

    def close(self) -> None:
        """Holds nothing: each registration has all that it needs."""


@dataclass(frozen=True)
class Exports:
    """What one front end is given: the head of the outbound region to read, its channels to write and to read."""

    memory: ArenaMemory
    sizes: arena.Sizes
    channels: tuple[int, ...]

    def head(self, domain: DocaDomain) -> bytes:
        """Header and telemetry page."""
        size = arena.OutboundLayout(self.sizes).channels_offset
        return self.memory.register(domain, Part(False, 0, size), READABLE).export()

    def keys(self, domain: DocaDomain, channel: int) -> ChannelKeys:
        """Both sides of a channel."""
        inbound, outbound = arena.InboundLayout(self.sizes), arena.OutboundLayout(self.sizes)
        into = Part(True, inbound.channel_offset(channel), inbound.channel_bytes)
        out = Part(False, outbound.channel_offset(channel), outbound.channel_bytes)
        return ChannelKeys(
            self.memory.register(domain, into, WRITABLE).export(), self.memory.register(domain, out, READABLE).export()
        )


class DocaRegistration:
    """See `Registration`. The keys are made for it and end with it.

    Raises:
        DocaError: the device refuses.
    """

    def __init__(self, library: DocaLibrary, settings: DocaSettings, peer: Offer, exports: Exports) -> None:
        self._library = library
        self._held = Held()
        self._was_stopped = False
        try:
            self._answer = self._let_in(settings, peer, exports)
        except BaseException:
            self._abandon()
            raise

    def _let_in(self, settings: DocaSettings, peer: Offer, exports: Exports) -> Answer:
        library, held = self._library, self._held
        device = Device(library, settings)
        held.add(device.close)
        domain = DocaDomain(library, device, held)
        head = exports.head(domain)
        channels = {channel: exports.keys(domain, channel) for channel in exports.channels}
        engine = ProgressEngine(library)
        held.add(engine.close)
        context = RdmaContext(library, device, engine, Access.RDMA_READ | Access.RDMA_WRITE)
        held.add(lambda: self._stop(context))
        answer = Answer(context.export(), head, channels)
        # Nothing is ever waited for here: the device serves the front end without this process.
        context.connect(peer.connection, patience=0)
        return answer

    def _abandon(self) -> None:
        """Before anybody was told the keys."""
        try:
            self._held.give_back()
        except DocaError as error:
            log.error("a DOCA object could not be given back", extra={"fields": {"reason": str(error)}})

    def _stop(self, context: RdmaContext) -> None:
        patience, self._was_stopped = AGAIN_SECONDS if self._was_stopped else STOP_SECONDS, True
        if not context.close(patience):
            raise self._library.error("doca_ctx_stop", Status.TIME_OUT)

    @property
    def answer(self) -> bytes:
        """The runtime's end of the connection, and the keys."""
        return self._answer.encode()

    def revoke(self) -> None:
        """Ends the connection, then the registration of all memory; see `Registration`."""
        try:
            self._held.give_back()
        except DocaError as error:
            raise RegistrationError(f"the device does not take back what a front end was given: {error}") from error

    def __repr__(self) -> str:
        return "DocaRegistration(redacted)"


def open_once(settings: DocaSettings) -> DocaLibrary:
    """The library, with which the device could be opened.

    Raises:
        RegistrationError: DOCA is not installed, or the device cannot be used.
    """
    library = _or_refuse(lambda: load_doca(settings.libraries))
    _or_refuse(lambda: Device(library, settings)).close()
    return library


Made = TypeVar("Made")


def _or_refuse(make: Callable[[], Made]) -> Made:
    try:
        return make()
    except (DocaError, DocaUnavailableError, RdmaError) as error:
        raise RegistrationError(str(error)) from error
