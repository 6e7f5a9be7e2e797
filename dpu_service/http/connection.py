"""What both protocols do with a transport: time limits, a client that does not read."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

from dpu_service.http.host import Host

MAX_HEAD_BYTES = 64 << 10
"""Of one request: target and headers."""
MAX_HEADERS = 200
WRITE_BUFFER_BYTES = 64 << 10
"""Of an answer that the kernel does not take, before whoever writes it waits."""
LINGER_SECONDS = 2.0
"""How long the rest of a body is still read after its answer: to stop at once would lose the answer."""


class Clock:
    """At most one call in the future."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, callback: Callable[[], None]) -> None:
        """Replaces what was set before."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, callback)

    def stop(self) -> None:
        """Nothing will be called."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connection(asyncio.Protocol, ABC):
    """A client's connection.

    A client that leaves what was written unread for `write_timeout` seconds is cut off, so nothing can wait for it for
    ever.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.transport: asyncio.Transport
        self._clock = Clock()
        """For what the client has to do next."""
        self._write_clock = Clock()
        self._writable = asyncio.Event()
        self._writable.set()
        self._ending = False
        self.has_room = True
        """Whether the client has taken most of what was written, and may get more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)  # TLS's own is 512 KiB
        self.host.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.host.connections.discard(self)
        self._stop_writing()
        self._clock.stop()
        self._write_clock.stop()
        self._lose_streams()
        self._writable.set()

    def eof_received(self) -> bool:
        """A client that closes its side counts as gone: of a request that is not streamed one cannot tell otherwise."""
        self._lose_streams()
        self.close()
        return False

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._writable.clear()
        self.has_room = False
        self._write_clock.start(self.host.config.write_timeout, self.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable.set()
        if not self._ending:
            self.has_room = True
            self._write_clock.stop()

    def write(self, data: bytes) -> None:
        """Sends, unless the connection is at its end."""
        if not self._ending:
            self.transport.write(data)

    async def writable(self) -> None:
        """Waits until the client has taken most of what was written."""
        if not self._writable.is_set():
            await self._writable.wait()

    def close(self) -> None:
        """Ends the connection when what is written has left, or could not leave in time."""
        if self._ending:
            return
        self._stop_writing()
        self._clock.stop()
        self._write_clock.start(self.host.config.write_timeout, self.abort)
        self.transport.close()

    def abort(self) -> None:
        """Ends the connection now."""
        self._stop_writing()
        self.transport.abort()

    @abstractmethod
    def drain(self) -> None:
        """The server is about to end."""

    @abstractmethod
    def _lose_streams(self) -> None:
        """Tells every request that its client is gone."""

    def _stop_writing(self) -> None:
        self._ending = True
        self.has_room = False

    def _scope(self, version: str, method: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
        """ASGI's description of a request.

        Raises:
            ValueError: the target is no path, or not ASCII.
        """
        path, _, query = target.partition(b"?")
        if not path.startswith(b"/") and path != b"*":
            raise ValueError("the target is no path")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method,
            "scheme": "https" if self.transport.get_extra_info("sslcontext") else "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": _address(self.transport.get_extra_info("peername")),
            "server": _address(self.transport.get_extra_info("sockname")),
        }


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple | list) and len(name) >= 2 else None
