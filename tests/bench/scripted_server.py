"""A real HTTP server on a real socket that answers by script, so that what a client measures is known beforehand."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

CLOSE = b""
"""As a piece: close the connection here."""

Piece = tuple[float, bytes]
"""Seconds to wait, then bytes to send."""

Script = Callable[[int, dict[str, Any]], Sequence[Piece]]
"""From a request's number (from 0) and body to its answer."""


def chunked(body: bytes) -> bytes:
    """One chunk of a chunked body; empty ends it."""
    return b"%x\r\n%s\r\n" % (len(body), body)


def event(payload: object) -> bytes:
    """A chunk with one server-sent event."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return chunked(f"data: {text}\n\n".encode())


def token(text: str, finish: str | None = None) -> bytes:
    """An event of the completions API."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, output: int) -> bytes:
    """The usage event that `stream_options.include_usage` asks for."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = event("[DONE]") + chunked(b"")


def whole(status: str, payload: object) -> bytes:
    """An answer that is not streamed."""
    body = json.dumps(payload).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class ScriptedServer:
    """What the server saw."""

    script: Script
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b"{}"
        self.bodies.append(json.loads(body))
        self.arrivals.append(asyncio.get_running_loop().time())
        for wait, piece in self.script(len(self.bodies) - 1, self.bodies[-1]):
            await asyncio.sleep(wait)
            if piece == CLOSE:
                return False
            writer.write(piece)
            await writer.drain()
        return True


@asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedServer]:
    """Serves on a free port of the loopback."""
    state = ScriptedServer(script)
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    state.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    try:
        yield state
    finally:
        server.close()
