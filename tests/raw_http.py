"""Clients that speak to a front end byte by byte, for what no well-behaved client does."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded

from tests.front_end import MODEL


def body(**fields: Any) -> bytes:
    """A completion request's body."""
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 150, **fields}).encode()


def dial(url: str, receive_buffer: int = 0) -> socket.socket:
    """A connection to a URL's host and port; with a small receive buffer the server soon has to wait."""
    host, port = url.split("://")[1].split(":")
    raw = socket.socket()
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(10)
    raw.connect((host, int(port)))
    return raw


def post(sent: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(sent)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + sent


def read_until(raw: socket.socket, end: bytes) -> bytes:
    """All that is received up to the piece that completes `end`, or the connection's end."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while end not in received and (part := raw.recv(65536)):
            received += part
    return received


def read_all(raw: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(65536):
            received += part
    return received


def send_until_cut(raw: socket.socket, parts: Iterable[bytes], every: float = 0.0) -> float:
    """Sends until the server will not have it; after so many seconds. Fails when it takes everything."""
    began = time.monotonic()
    for part in parts:
        try:
            raw.sendall(part)
        except ConnectionError:
            return time.monotonic() - began
        time.sleep(every)
    raise AssertionError("the server took it all")


class Http2Client:
    """An HTTP/2 client whose every frame is the test's own doing, over plain TCP with prior knowledge."""

    def __init__(self, url: str, receive_buffer: int = 0) -> None:
        self.raw = dial(url, receive_buffer)
        self.h2 = H2Connection()
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        """Sends what the state machine wants to send."""
        self.raw.sendall(self.h2.data_to_send())

    def request(self, method: str, path: str, sent: bytes | None = None, *headers: tuple[str, str]) -> int:
        """Opens a stream; its number. With `sent` of None it stays open."""
        number = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
        self.h2.send_headers(number, [*pseudo, *headers], end_stream=sent == b"")
        if sent:
            self.h2.send_data(number, sent, end_stream=True)
        self.flush()
        return number

    def events(self, seconds: float = 10, *, acknowledge: bool = True) -> Iterator[Event]:
        """What the server sends, until it closes or the time is over."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.raw.settimeout(left)
            try:
                data = self.raw.recv(65536)
            except (TimeoutError, ConnectionResetError):
                return
            if not data:
                return
            happened = self.h2.receive_data(data)
            for event in happened:
                if acknowledge and isinstance(event, DataReceived) and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id or 0)
            with contextlib.suppress(OSError):
                self.flush()
            yield from happened

    def answer(self, number: int) -> tuple[int, bytes]:
        """Status and body of a stream's whole answer."""
        status, received = 0, b""
        for event in self.events():
            if getattr(event, "stream_id", 0) != number:
                continue
            if isinstance(event, ResponseReceived):
                status = int(dict(event.headers or [])[b":status"])
            elif isinstance(event, DataReceived):
                received += event.data or b""
            elif isinstance(event, StreamEnded):
                break
        return status, received
