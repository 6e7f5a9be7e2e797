"""Makes this front end's end of a DOCA connection."""

from __future__ import annotations

import time

from blink_proto import arena
from blink_proto.doca.blobs import Offer
from blink_proto.doca.errors import DocaError, DocaUnavailableError
from blink_proto.doca.library import load_doca
from blink_proto.doca.settings import DocaSettings
from dpu_service.transport.base import Range, TransportError
from dpu_service.transport.doca.session import DocaSession
from dpu_service.transport.doca.transport import DocaTransport

FIRST_READ_SECONDS = 5.0
_PAUSE_SECONDS = 0.001


class DocaConnector:
    """See `Connector`.

    Raises:
        TransportError: DOCA is not installed, or there is no device that can do RDMA writes and reads.
    """

    def __init__(self, settings: DocaSettings) -> None:
        try:
            self._session: DocaSession | None = DocaSession(load_doca(settings.libraries), settings)
        except (DocaError, DocaUnavailableError) as error:
            raise TransportError(str(error)) from error
        self._offer = Offer(self._session.exported)

    @property
    def offer(self) -> bytes:
        """This end of the connection."""
        return self._offer.encode()

    def connect(self, answer: bytes, sizes: arena.Sizes, channel: int) -> DocaTransport:
        """Connects, and reads once all that is read at a start: header, telemetry and the channel's own page."""
        session = self._session
        if session is None:
            raise TransportError("a connector is used once")
        try:
            session.connect(answer, sizes, channel)
        except DocaError as error:
            raise TransportError(str(error)) from error
        self._session = None
        transport = DocaTransport(session)
        layout = arena.OutboundLayout(sizes)
        control = layout.channel_offset(channel) + layout.channel_control_offset
        try:
            _read_now(transport, Range(0, layout.channels_offset), Range(control, arena.ChannelOut.itemsize))
        except TransportError:
            transport.close()
            raise
        return transport

    def close(self) -> None:
        """Lets go what was not connected."""
        if self._session is not None:
            self._session.close()
            self._session = None


def _read_now(transport: DocaTransport, *ranges: Range) -> None:
    ticket = transport.fetch(*ranges)
    deadline = time.monotonic() + FIRST_READ_SECONDS
    while not transport.fetched(ticket):
        if time.monotonic() >= deadline:
            raise TransportError("the arena does not answer")
        time.sleep(_PAUSE_SECONDS)
