"""One request of an HTTP/2 connection."""

from __future__ import annotations

import asyncio
from typing import Protocol

from h2.errors import ErrorCodes

from dpu_service.http.host import Host, Message
from dpu_service.http.stream import Headers, Stream

_NOT_IN_HTTP2 = (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade")


class Carrier(Protocol):
    """What a stream asks of its connection."""

    host: Host

    has_room: bool

    async def writable(self) -> None:
        """Waits until it has."""

    def room(self, stream: Http2Stream) -> int:
        """Bytes that may be sent now."""

    async def wait_for_room(self, stream: Http2Stream) -> None:
        """Returns when that may have changed."""

    def send_head(self, stream: Http2Stream, headers: Headers) -> None:
        """The head of an answer."""

    def send_part(self, stream: Http2Stream, data: bytes, last: bool) -> None:
        """A part of an answer, for which there is room."""

    def taken(self, stream: Http2Stream, size: int) -> None:
        """The client may send so much more."""

    def answered(self, stream: Http2Stream) -> None:
        """The answer is whole."""

    def reset(self, stream: Http2Stream, code: ErrorCodes) -> None:
        """Ends the stream."""


class Http2Stream(Stream):
    """A request of an HTTP/2 connection."""

    def __init__(self, connection: Carrier, number: int, scope: Message) -> None:
        super().__init__(scope)
        self.number = number
        self.window = asyncio.Event()
        """Set when there may be room to send."""
        self._connection = connection

    def end_body(self) -> None:
        """After the answer it is all that was waited for."""
        super().end_body()
        if self.finished:
            self._connection.answered(self)

    def lose(self) -> None:
        """Gives back the connection's window and wakes whoever waits for room."""
        self._connection.taken(self, self.buffered)
        super().lose()
        self.window.set()

    def _head(self, status: int, headers: Headers) -> None:
        kept = [(name, value) for name, value in headers if name not in _NOT_IN_HTTP2]
        date = (b"date", self._connection.host.date)
        self._connection.send_head(self, [(b":status", str(status).encode()), date, *kept])

    async def _part(self, data: bytes, last: bool) -> None:
        rest = memoryview(data)
        while not self.gone:
            room = self._connection.room(self)
            if rest and not room:
                await self._connection.wait_for_room(self)
                continue
            part, rest = rest[:room], rest[room:]
            ends = last and not rest
            if part or ends:
                self._connection.send_part(self, bytes(part), ends)
            if not rest:
                break
        if not last:
            await self._connection.writable()

    def write_now(self, data: bytes) -> bool:
        """See `Stream`."""
        writable = self.started and not (self.gone or self.finished) and self._connection.has_room
        if not writable or self._connection.room(self) < len(data):
            return False
        self._connection.send_part(self, data, last=False)
        return True

    def _over(self) -> None:
        self._connection.answered(self)

    def _fail(self) -> None:
        self._connection.reset(self, ErrorCodes.INTERNAL_ERROR)

    def _taken(self, size: int) -> None:
        self._connection.taken(self, size)
