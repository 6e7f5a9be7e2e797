"""HTTP/1.1 on inherited sockets: uvicorn's httptools protocol, without its process management.

Uvicorn's server class owns signals, start-up and shutdown; here the supervisor does, and a drain has to go on
answering on open connections. So only its protocol is used, with limits that it lacks.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from email.utils import formatdate
from functools import partial
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from dpu_service.api.app import App
from dpu_service.api.errors import ApiError
from dpu_service.api.exchange import WRITE_NOW
from dpu_service.config import WorkerConfig

BACKLOG = 2048
TLS_HANDSHAKE_SECONDS = 20.0
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200

_BAD_REQUEST = ApiError(400, "this is not a valid HTTP request", code="invalid_http").body()


class _HeadTooLargeError(Exception):
    """Ends parsing; the client gets 400."""


class Protocol(HttpToolsProtocol):
    """With a time limit and size limits for the head of each request, and errors in the API's shape."""

    def __init__(self, header_timeout: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._header_timeout = header_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock runs from the connection on."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A later request of the connection begins."""
        self._head_bytes = 0
        self._start_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Counts the bytes."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts the bytes."""
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise _HeadTooLargeError

    def on_headers_complete(self) -> None:
        """Stops the clock."""
        self._stop_timer()
        super().on_headers_complete()
        self.scope["extensions"] = {WRITE_NOW: partial(_write_now, self.cycle)}  # type: ignore[dict-item]

    def send_400_response(self, msg: str) -> None:
        """In the API's shape."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(_BAD_REQUEST)}"
        self.transport.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + _BAD_REQUEST)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._header_timeout, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _write_now(cycle: RequestResponseCycle, data: bytes) -> bool:
    """A chunk of a body, without the task switches of ASGI's `send`."""
    if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


class Listener:
    """Serves one listening socket.

    Args:
        tls: None for plain HTTP.
    """

    def __init__(self, app: App, config: WorkerConfig, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._sock = sock
        self._tls = tls
        self._header_timeout = config.header_timeout
        self._state = ServerState()
        self._config = Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=config.keep_alive,  # type: ignore[arg-type]
        )
        self._config.load()
        self._server: asyncio.Server | None = None
        self._clock: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begins to accept connections."""
        loop = asyncio.get_running_loop()
        handshake = TLS_HANDSHAKE_SECONDS if self._tls is not None else None
        self._tick()
        self._server = await loop.create_server(
            self._protocol, sock=self._sock, ssl=self._tls, backlog=BACKLOG, ssl_handshake_timeout=handshake
        )

    def stop_accepting(self) -> None:
        """Closes the listening socket; open connections go on."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Closes every connection."""
        if self._clock is not None:
            self._clock.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()

    def _protocol(self) -> Protocol:
        return Protocol(self._header_timeout, config=self._config, server_state=self._state, app_state={})

    def _tick(self) -> None:
        date = formatdate(usegmt=True).encode()
        self._state.default_headers = [(b"date", date)]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tick)
