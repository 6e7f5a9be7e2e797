"""A listening socket that several workers share, and its TLS context, which may be renewed while it serves."""

from __future__ import annotations

import asyncio
import socket
import ssl

from dpu_service.config import WorkerConfig
from dpu_service.http.choose import Choose
from dpu_service.http.host import App, Host

BACKLOG = 2048


class Listener:
    """Serves one listening socket.

    Args:
        tls: None for plain HTTP.
    """

    def __init__(self, app: App, config: WorkerConfig, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.tls = tls is not None
        self._sock = sock
        self._context = tls
        self._host = Host(app, config)
        self._server: asyncio.Server | None = None
        self._clock: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begins to accept connections."""
        self._tick()
        await self._accept()

    async def renew(self, tls: ssl.SSLContext) -> None:
        """Handshakes from now on use `tls`; connections and handshakes under way keep what they began with."""
        before, self._context = self._server, tls
        await self._accept()
        if before is not None:
            before.close()

    def drain(self) -> None:
        """Closes the listening socket; open connections end with their next answer."""
        if self._server is not None:
            self._server.close()
        self._sock.close()
        self._host.drain()

    def close(self) -> None:
        """Closes every connection."""
        if self._clock is not None:
            self._clock.cancel()
        self._host.close()

    async def _accept(self) -> None:
        handshake = self._host.config.header_timeout if self.tls else None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Choose(self._host),
            sock=self._sock.dup(),  # so that a server can be replaced without closing what the kernel queues
            ssl=self._context,
            backlog=BACKLOG,
            ssl_handshake_timeout=handshake,
        )

    def _tick(self) -> None:
        self._host.tick()
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tick)
