"""HTTP/1.1 on asyncio protocols, with little work per byte.

The generator shares the machine with the server under test, so each token must cost it microseconds: the parser is
httptools (C), there is no task switch per read, and connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools


class ConnectionLost(Exception):
    """The peer closed in the middle of an answer, or sent something that is not HTTP."""


@dataclass(frozen=True)
class Target:
    """Where requests go. `prefix` is the path before `/completions`, usually `/v1`."""

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None

    @classmethod
    def from_url(cls, url: str, insecure: bool = False) -> Target:
        """Takes `scheme://host[:port][/path]`, with or without the `/v1`.

        Raises:
            ValueError: not an http or https URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https URL: {url}")
        path = parts.path.rstrip("/")
        prefix = path if path.endswith("/v1") else path + "/v1"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.hostname, port, prefix, tls_context(insecure) if parts.scheme == "https" else None)


def tls_context(insecure: bool) -> ssl.SSLContext:
    """A client's context; `insecure` accepts any certificate."""
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.used = False
        self.closed = False
        self._parser: httptools.HttpResponseParser | None = None
        self._answered: asyncio.Future[bool] | None = None
        self._status_seen: Callable[[int], None] = lambda status: None
        self._body_seen: Callable[[bytes], None] = lambda piece: None
        self.got_bytes = False

    async def exchange(
        self, request: bytes, on_status: Callable[[int], None], on_body: Callable[[bytes], None]
    ) -> bool:
        """Sends a request; True when the connection may be used again after the answer.

        Raises:
            ConnectionLost: the answer is not complete or not HTTP.
        """
        self._status_seen, self._body_seen = on_status, on_body
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self.got_bytes = False
        if self.closed:
            raise ConnectionLost("closed before the request was sent")
        self.transport.write(request)
        reusable = await self._answered
        self.used = True
        return reusable and not self.closed

    def close(self) -> None:
        self.transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got_bytes = True
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lose(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._lose(str(exc) if exc else "closed in the middle of the answer")

    def _lose(self, why: str) -> None:
        if self._answered and not self._answered.done():
            self._answered.set_exception(ConnectionLost(why))

    # httptools callbacks

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status_seen(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self._body_seen(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._answered and not self._answered.done():
            self._answered.set_result(self._parser.should_keep_alive())


class Pool:
    """Connections to one target: idle ones are used again, as clients do."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []

    async def exchange(
        self, request: bytes, on_status: Callable[[int], None], on_body: Callable[[bytes], None]
    ) -> None:
        """One exchange on an idle or a new connection.

        A used connection that the server closes before it answers anything is replaced once: it was idle for too
        long, and the request was not taken.

        Raises:
            ConnectionLost: the answer is not complete or not HTTP.
            OSError: no connection (ssl.SSLError included).
        """
        connection = await self._take()
        try:
            reusable = await connection.exchange(request, on_status, on_body)
        except ConnectionLost:
            if not connection.used or connection.got_bytes:
                raise
            connection = await self._connect()
            reusable = await connection.exchange(request, on_status, on_body)
        except asyncio.CancelledError:
            connection.close()
            raise
        if reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        target = self._target
        _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=target.tls)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
