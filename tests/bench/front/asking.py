"""Requests and connections of the clients, as bytes and sockets."""

from __future__ import annotations

import json
import socket
import ssl
from functools import cache
from urllib.parse import urlsplit

from tests.front_end import MODEL


def request(tokens: int, *, chat: bool, stream: bool) -> bytes:
    """A whole HTTP request for so many tokens."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    fields = {"model": MODEL, "max_tokens": tokens, "stream": stream, "ignore_eos": True, **prompt}
    body = json.dumps(fields).encode()
    path = "chat/completions" if chat else "completions"
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@cache
def tls_context() -> ssl.SSLContext:
    """A client's, which takes any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def connect(url: str) -> socket.socket:
    """A TCP connection to the URL's host."""
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname or "", parts.port or 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
