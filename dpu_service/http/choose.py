"""Which protocol a connection speaks: by TLS's negotiation, or on plain TCP by its first bytes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from dpu_service.http.connection import Clock, Connection
from dpu_service.http.host import Host
from dpu_service.http.http1 import Http1

try:
    from dpu_service.http.http2 import Http2
except ImportError:  # `h2` is not installed; the supervisor says so
    Http2 = None  # type: ignore[assignment, misc]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What an HTTP/2 client sends first (RFC 9113, 3.4)."""
HAS_HTTP2 = Http2 is not None
ALPN = ["h2", "http/1.1"] if HAS_HTTP2 else ["http/1.1"]


class Choose(asyncio.Protocol):
    """The first protocol of every connection; hands the transport over as soon as it knows."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._transport: asyncio.Transport
        self._received = b""
        self._clock = Clock()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        tls: Any = transport.get_extra_info("ssl_object")
        if len(self._host.connections) >= 2 * self._host.config.max_connections:
            self._transport.abort()
        elif tls is None:
            self._clock.start(self._host.config.header_timeout, self._transport.abort)
        else:
            self._hand_over(Http2(self._host) if tls.selected_alpn_protocol() == "h2" else Http1(self._host))

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._received += data
        if HAS_HTTP2 and self._received.startswith(PREFACE):
            self._hand_over(Http2(self._host))
        elif not PREFACE.startswith(self._received):
            self._hand_over(Http1(self._host))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._clock.stop()

    def _hand_over(self, protocol: Connection) -> None:
        self._clock.stop()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._received:
            protocol.data_received(self._received)
