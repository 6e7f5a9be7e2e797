"""HTTP/1.1 (and 1.0) by httptools' parser."""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus

import httptools

from dpu_service.api.errors import ApiError, unavailable
from dpu_service.http.connection import LINGER_SECONDS, MAX_HEAD_BYTES, MAX_HEADERS, Connection
from dpu_service.http.host import Host, Message
from dpu_service.http.stream import Headers, Stream

MAX_BODY_WAITING = 256 << 10
"""Bytes of a body that wait for the application before the connection is no longer read."""
MAX_AHEAD_BYTES = 64 << 10
MAX_AHEAD_REQUESTS = 16
"""What a client may send before it has the answer to its last request."""

_STATUS = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus}
_BAD_REQUEST = ApiError(400, "this is not a valid HTTP request", code="invalid_http")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _HeadTooLargeError(Exception):
    """Ends parsing; the client gets 400."""


class Http1Stream(Stream):
    """A request of an HTTP/1 connection."""

    def __init__(self, connection: Http1, scope: Message, *, keep_alive: bool, expects: bool) -> None:
        super().__init__(scope)
        self.keep_alive = keep_alive
        self._connection = connection
        self._expects = expects
        self._chunked = False
        self._unsent_head = b""
        """Goes out with the first part of the body: one packet and one TLS record for both."""

    def _head(self, status: int, headers: Headers) -> None:
        closes = self._connection.host.draining or not self.body_over
        parts = [_STATUS[status], b"date: ", self._connection.host.date, b"\r\n"]
        sized = False
        for name, value in headers:
            if b"\n" in value or b"\r" in value:
                raise ValueError("a header value with a line break")
            if name == b"connection":
                closes = closes or value == b"close"
                continue
            parts += (name, b": ", value, b"\r\n")
            sized = sized or name == b"content-length"
        parts.append(self._framing(sized, closes))
        self._unsent_head = b"".join(parts)

    def _framing(self, sized: bool, closes: bool) -> bytes:
        """How the client sees where the answer ends. HTTP/1.0 knows no chunks: there it ends with the connection."""
        old = self.scope["http_version"] == "1.0"
        self._chunked = not sized and not old
        kept = self.keep_alive and not closes and (sized or not old)
        line = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        if kept:
            line += b"connection: keep-alive\r\n" if old else b""
        else:
            line += b"connection: close\r\n"
        self.keep_alive = kept
        return line + b"\r\n"

    async def _part(self, data: bytes, last: bool) -> None:
        if self._chunked and self.scope["method"] != "HEAD":
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data += b"0\r\n\r\n" if last else b""
        if data or last:
            self._write(data)
        if not last:
            await self._connection.writable()

    def write_now(self, data: bytes) -> bool:
        """See `Stream`. In one piece, as it is done for every token."""
        connection = self._connection
        if self.gone or self.finished or not (self._chunked and connection.has_room) or self._unsent_head:
            return False
        connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _write(self, data: bytes) -> None:
        if self._unsent_head:
            data, self._unsent_head = self._unsent_head + data, b""
        if data:
            self._connection.write(data)

    def _over(self) -> None:
        self._connection.answered(self)

    def _fail(self) -> None:
        self._connection.abort()

    def _wants_more(self) -> None:
        if self._expects and not (self.body_over or self.started):
            self._connection.write(_CONTINUE)
        self._expects = False
        self._connection.resume_reading()


class Http1(Connection):
    """A connection with one request after the other. Times and sizes of everything a client sends are limited.

    While a request is being answered the connection is still read, or the client's end would not be noticed.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._parser = self._new_parser()
        self._active: Http1Stream | None = None
        """The request that is being answered."""
        self._filling: Http1Stream | None = None
        """The request whose body is being received."""
        self._next: deque[Http1Stream] = deque()
        self._ahead = bytearray()
        self._in_head = False
        self._head_bytes = 0
        self._url = b""
        self._headers: Headers = []
        self._lingering = False
        self._paused = False
        self._surplus = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The clock runs from the connection on. One connection too many gets its answer to its first request."""
        self._surplus = self.host.full
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._ending:
            return
        if self._ahead or self._busy:
            self._keep_for_later(data)
        else:
            self._parse(data)

    def drain(self) -> None:
        """Answers say that the connection ends with them; one that is idle may still ask, and is told so."""
        return

    def answered(self, stream: Http1Stream) -> None:
        """The answer of the active request is written."""
        self._active = None
        if not stream.keep_alive:
            self._finish()
        elif self._next:
            self._start(self._next.popleft())
        elif self._in_head:
            self._await_head()
        else:
            self._clock.start(self.host.config.keep_alive, self.close)
        if self._ahead and not self._ending:
            asyncio.get_running_loop().call_soon(self._parse_later)

    def resume_reading(self) -> None:
        """The application wants more of the body."""
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    # Parser callbacks

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self._next) >= MAX_AHEAD_REQUESTS:
            raise _HeadTooLargeError
        self._url, self._headers = b"", []
        if not self._in_head:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._url += url
        self._check_head(len(self._url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header."""
        self._headers.append((name.lower(), value))
        if len(self._headers) > MAX_HEADERS:
            raise _HeadTooLargeError

    def on_headers_complete(self) -> None:
        """The head is there: the application may begin."""
        self._check_head(len(self._url) + sum(len(name) + len(value) for name, value in self._headers))
        self._in_head, self._head_bytes = False, 0
        self._clock.stop()
        stream = self._request()
        self._filling = stream
        if self._active is None:
            self._start(stream)
        else:
            self._next.append(stream)

    def on_body(self, body: bytes) -> None:
        """A part of the body; what comes after the answer is thrown away."""
        if self._filling is not None:
            self._filling.feed(body)
            if self._filling.buffered > MAX_BODY_WAITING and not self._paused:
                self._paused = True
                self.transport.pause_reading()

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._filling is not None:
            self._filling.end_body()
        self._filling = None
        if self._lingering:
            self.close()
            return
        self.resume_reading()

    def _parse(self, data: bytes) -> None:
        if self._filling is None and not self._in_head:
            self._await_head()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # not offered: goes on as if it had not been asked for
            self._parser = self._new_parser()
            rest = data[upgrade.args[0] :]
            if rest:
                self.data_received(rest)
        except httptools.HttpParserError:
            self._refuse(_BAD_REQUEST)
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_BAD_REQUEST)

    def _parse_later(self) -> None:
        if self._ahead and not (self._busy or self._ending):
            data = bytes(self._ahead)
            self._ahead.clear()
            self._parse(data)

    @property
    def _busy(self) -> bool:
        """Whether a whole request is being answered: what comes now is for later."""
        return self._active is not None and self._filling is not self._active

    def _keep_for_later(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD_BYTES:
            self._lose_streams()
            self.abort()

    def _await_head(self) -> None:
        """The clock stands while an answer is under way: what comes then waits unread."""
        self._in_head = True
        if self._active is None:
            self._clock.start(self.host.config.header_timeout, self.close)

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # what follows is dropped, not answered
        return parser

    def _check_head(self, size: int) -> None:
        if size > MAX_HEAD_BYTES:
            raise _HeadTooLargeError

    def _request(self) -> Http1Stream:
        url = httptools.parse_url(self._url)
        target = (url.path or b"/") + (b"?" + url.query if url.query else b"")
        version = self._parser.get_http_version()
        scope = self._scope(version, self._parser.get_method().decode("ascii"), target, self._headers)
        expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in self._headers)
        return Http1Stream(self, scope, keep_alive=self._parser.should_keep_alive(), expects=expects)

    def _start(self, stream: Http1Stream) -> None:
        if self._surplus:
            self._refuse(unavailable("too many connections", "too_many_connections"))
            return
        self._active = stream
        self.host.run(stream)

    def _finish(self) -> None:
        """After the last answer: at once, or when the request has come in whole."""
        self._next.clear()
        if self._filling is None:
            self.close()
            return
        self._lingering = True
        self.resume_reading()
        self._clock.start(LINGER_SECONDS, self.close)

    def _refuse(self, error: ApiError) -> None:
        """Answers what is not even a request, unless another answer is under way or due first."""
        if self._active is None or (self._active is self._filling and not self._active.started):
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
            self.write(_STATUS[error.status] + head + retry + b"\r\n" + body)
        self._lose_streams()
        self.close()

    def _lose_streams(self) -> None:
        for stream in (self._active, *self._next):
            if stream is not None:
                stream.lose()
        self._active = None
        self._next.clear()
