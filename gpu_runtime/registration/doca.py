"""Registration for the `doca` transport: each front end has a device handle, a connection and memory of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from blink_proto.doca.blobs import Answer, BlobError, ChannelKeys, Offer
from blink_proto.doca.constants import Access
from blink_proto.doca.context import RdmaContext
from blink_proto.doca.device import Device
from blink_proto.doca.engine import ProgressEngine
from blink_proto.doca.errors import DocaError, DocaUnavailableError
from blink_proto.doca.library import DocaLibrary, load_doca
from blink_proto.doca.memory import DmaBuf, Mmap, Place
from blink_proto.doca.settings import DocaSettings
from gpu_runtime.registration.base import RegistrationError

log = logging.getLogger(__name__)

WRITABLE = Access.LOCAL_READ_WRITE | Access.RDMA_WRITE
READABLE = Access.LOCAL_READ_ONLY | Access.RDMA_READ


Part = tuple[Place, DmaBuf | None]


@dataclass(frozen=True)
class Region:
    """One of the arena's regions: memory of this process, or of a GPU when it comes with a dma-buf."""

    place: Place
    dma_buf: DmaBuf | None = None

    @classmethod
    def of_array(cls, array: NDArray[np.uint8]) -> Region:
        """Memory of this process."""
        return cls(Place(array.ctypes.data, array.nbytes))

    def part(self, offset: int, size: int) -> Part:
        """Some of it, registered alone."""
        there = self.dma_buf and DmaBuf(self.dma_buf.descriptor, self.dma_buf.offset + offset)
        return Place(self.place.address + offset, size), there


@dataclass(frozen=True)
class Parts:
    """What a front end may reach: the head of the outbound region, and inbound and outbound memory by channel."""

    head: Part
    channels: dict[int, tuple[Part, Part]]


class DocaRegistrar:
    """See `Registrar`.

    Args:
        inbound, outbound: the arena; must stay where they are until `close`.

    Raises:
        RegistrationError: DOCA is not installed, or the device cannot be used.
    """

    def __init__(self, inbound: Region, outbound: Region, sizes: arena.Sizes, settings: DocaSettings) -> None:
        self._regions = inbound, outbound
        self._layouts = arena.InboundLayout(sizes), arena.OutboundLayout(sizes)
        self._settings = settings
        self._library = _or_refuse(lambda: load_doca(settings.libraries))
        _or_refuse(lambda: Device(self._library, settings)).close()  # better known now than with a front end

    def register(self, offer: bytes, channels: tuple[int, ...]) -> DocaRegistration:
        """Exports the channels' memory and connects to the front end."""
        try:
            peer = Offer.decode(offer)
        except BlobError as error:
            raise RegistrationError(f"the offer is not one of the doca transport: {error}") from error
        return _or_refuse(lambda: DocaRegistration(self._library, self._settings, peer, self._parts(channels)))

    def close(self) -> None:
        """Holds nothing: each registration has all that it needs."""

    def _parts(self, channels: tuple[int, ...]) -> Parts:
        inbound, outbound = self._regions
        into, out = self._layouts
        return Parts(
            outbound.part(0, out.channels_offset),
            {
                channel: (
                    inbound.part(into.channel_offset(channel), into.channel_bytes),
                    outbound.part(out.channel_offset(channel), out.channel_bytes),
                )
                for channel in channels
            },
        )


class DocaRegistration:
    """See `Registration`. The keys are made for it and end with it.

    Raises:
        DocaError: the device refuses.
    """

    def __init__(self, library: DocaLibrary, settings: DocaSettings, peer: Offer, parts: Parts) -> None:
        self._library = library
        with ExitStack() as undo:
            self._device = Device(library, settings)
            undo.callback(self._device.close)
            self._undo = undo
            head = self._export(parts.head, READABLE)
            channels = {
                number: ChannelKeys(self._export(into, WRITABLE), self._export(out, READABLE))
                for number, (into, out) in parts.channels.items()
            }
            engine = ProgressEngine(library)
            undo.callback(engine.close)
            rights = Access.RDMA_READ | Access.RDMA_WRITE
            context = RdmaContext(library, self._device, engine, rights)
            undo.callback(context.close)
            self._answer = Answer(context.export(), head, channels)
            # Nothing is ever waited for here: the device serves the front end without this process.
            context.connect(peer.connection, patience=0)
            self._undo = undo.pop_all()

    @property
    def answer(self) -> bytes:
        """The runtime's end of the connection, and the keys."""
        return self._answer.encode()

    def revoke(self) -> None:
        """Ends the connection, then the registration of all memory; a step that fails does not keep the others back."""
        try:
            self._undo.close()
        except DocaError as error:
            log.error("a DOCA object could not be given back", extra={"fields": {"reason": str(error)}})

    def __repr__(self) -> str:
        return "DocaRegistration(redacted)"

    def _export(self, part: Part, access: Access) -> bytes:
        memory = Mmap.register(self._library, self._device, part[0], access, part[1])
        self._undo.callback(memory.close)
        return memory.export()


Made = TypeVar("Made")


def _or_refuse(make: Callable[[], Made]) -> Made:
    try:
        return make()
    except (DocaError, DocaUnavailableError) as error:
        raise RegistrationError(str(error)) from error
