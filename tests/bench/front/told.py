"""An ASGI application that streams the same event to all its clients in every period, for `servers`: what is left when
everything is taken away that is not the server's. `python -m tests.bench.front.told PORT CERTIFICATE KEY` serves it by
the front end's own protocols.

A request with `"stream":true` is answered with `max_tokens` events once BLINK_STREAMS clients wait for theirs; any
other POST with one completion; `GET /spent` with seconds of CPU time from the moment when all streams had begun to the
last token, and with the number of their tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

STREAMS = int(os.environ.get("BLINK_STREAMS", "256"))
RATE = float(os.environ.get("BLINK_RATE", "50"))
"""Tokens/s of each stream."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_CHUNK = {"id": "cmpl-0123456789abcdef01234567", "object": "text_completion", "created": 1764500000, "model": "tiny"}
_EVENT = json.dumps(_CHUNK | {"choices": [{"index": 0, "text": "%s", "logprobs": None, "finish_reason": None}]})
_LINE = b"data: " + _EVENT.replace(" ", "").encode() + b"\n\n"
_ONE = json.dumps(_CHUNK | {"choices": [{"index": 0, "text": "o"}], "usage": {"completion_tokens": 1}}).encode()


class Told:
    """See the module."""

    def __init__(self) -> None:
        self._quick: list[Callable[[bytes], bool]] = []
        self._lines: list[bytes] = []
        self._news: asyncio.Future[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._open = self._over = 0
        self._spent = 0.0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            raise RuntimeError("HTTP only")
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        if scope["path"] == "/spent":
            await _whole(send, json.dumps([self._spent, STREAMS * len(self._lines)]).encode())
        elif json.loads(body).get("stream"):
            await self._stream(scope, send, json.loads(body)["max_tokens"])
        else:
            await _whole(send, _ONE)

    async def _stream(self, scope: Message, send: Send, tokens: int) -> None:
        await _start(send, b"text/event-stream")
        await send({"type": "http.response.body", "body": b": begun\n\n", "more_body": True})
        self._open += 1
        if self._open == STREAMS:
            self._ticking = asyncio.create_task(self._tick(tokens))
        write_now = scope.get("extensions", {}).get("blink.write_now")
        if write_now is not None and "BLINK_BY_SEND" not in os.environ:
            self._quick.append(write_now)
            await self._news_that(tokens)
        else:
            await self._send_all(send, tokens)
        self._over += 1
        if self._over == STREAMS:
            self._spent += time.process_time()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send_all(self, send: Send, tokens: int) -> None:
        sent = 0
        while sent < tokens:
            await self._news_that(sent + 1)
            lines, sent = self._lines[sent:], len(self._lines)
            await send({"type": "http.response.body", "body": b"".join(lines), "more_body": True})

    async def _news_that(self, tokens: int) -> None:
        """Returns when there are so many."""
        while len(self._lines) < tokens:
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await self._news

    async def _tick(self, tokens: int) -> None:
        begun = time.monotonic()
        self._spent = -time.process_time()
        for tick in range(tokens):
            await asyncio.sleep(max(begun + tick / RATE - time.monotonic(), 0))
            self._lines.append(_LINE % f"{tick:04x}".encode())
            for write_now in self._quick:
                if not write_now(self._lines[-1]):
                    raise RuntimeError("a client is too slow for this")
            if self._news is not None and (len(self._quick) < STREAMS or tick == tokens - 1):
                self._news.set_result(None)
                self._news = None


async def _start(send: Send, kind: bytes, *more: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *more]})


async def _whole(send: Send, body: bytes) -> None:
    await _start(send, b"application/json", (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.body", "body": body, "more_body": False})


app = Told()


async def _serve(port: int, certificate: str, key: str) -> None:
    from dpu_service.config import WorkerConfig
    from dpu_service.server import Listener
    from dpu_service.tls import server_context

    sock = socket.create_server(("127.0.0.1", port), backlog=512)
    await Listener(app, WorkerConfig(), sock, server_context(certificate, key)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
