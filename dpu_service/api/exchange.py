"""One HTTP request and its answer, free of any server's types except ASGI's two callables."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dpu_service.api.bodies import BodyRoom
from dpu_service.api.errors import ApiError, unavailable
from dpu_service.tenants.account import Account

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

WriteNow = Callable[[bytes], bool]
WRITE_NOW = "blink.write_now"
"""Extension of the ASGI scope: sends a part of the body at once; False while the client is slow to read."""

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class Exchange:
    """Reads the request, writes the answer, and tells when the client goes away."""

    def __init__(self, scope: Message, receive: Receive, send: Send, room: BodyRoom) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.client: str = (scope.get("client") or ("", 0))[0]
        self.request_id = secrets.token_hex(8)
        self.arrived = time.monotonic()
        self.notes: dict[str, Any] = {}
        """For the access log: numbers and names, never text of a prompt."""
        self.account: Account | None = None
        """Whose request this is, where a key is needed."""
        self.extra: dict[bytes, bytes] = {}
        """Headers of the answer, whatever it will be."""
        self.status = 0
        self.finished = False
        self.close_after = False
        self._room = room
        self._body_bytes = 0
        self._receive = receive
        self._send = send
        self.write_now: WriteNow = scope.get("extensions", {}).get(WRITE_NOW, _never)
        """Sends a part of the body without waiting; False, with nothing sent, where only `write` can do it."""
        self._watcher: asyncio.Task[None] | None = None

    async def body(self, most_bytes: int, timeout: float) -> bytes:
        """The whole body.

        Raises:
            ApiError: 413 when it is longer, 408 when it does not come, 503 when there is no room for it, 400 when the
                client went away.
        """
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most_bytes:
            raise self._too_large(most_bytes)
        try:
            async with asyncio.timeout(timeout):
                return await self._read(most_bytes)
        except TimeoutError:
            self.close_after = True
            raise ApiError(408, "the body did not arrive in time", code="timeout") from None

    def forget_body(self) -> None:
        """Nobody needs the body any more."""
        self._room.give_back(self._body_bytes)
        self._body_bytes = 0

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Calls back when the client disconnects before the answer is finished. The body must have been read."""
        self._watcher = asyncio.create_task(self._watch(callback))

    @property
    def started(self) -> bool:
        """Whether the head of the answer is out."""
        return self.status != 0

    async def start(self, status: int, content_type: bytes, extra: dict[bytes, bytes] | None = None) -> None:
        """Sends the head of an answer; without a content-length it is chunked."""
        headers = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode())]
        headers += [*self.extra.items(), *(extra or {}).items()]
        if self.close_after:
            headers.append((b"connection", b"close"))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Sends a part of the body; waits while the client is slow to read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Sends the last part of the body."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def reply(
        self, status: int, body: bytes, content_type: bytes = JSON, extra: dict[bytes, bytes] | None = None
    ) -> None:
        """A whole answer."""
        await self.start(status, content_type, {b"content-length": str(len(body)).encode(), **(extra or {})})
        await self.finish(body)

    async def refuse(self, error: ApiError) -> None:
        """An error as a whole answer."""
        self.notes["error"] = error.code
        await self.reply(error.status, error.body(), extra=error.headers())

    def close(self) -> None:
        """Stops watching the client."""
        self.forget_body()
        if self._watcher is not None:
            self._watcher.cancel()

    async def _read(self, most_bytes: int) -> bytes:
        received = bytearray()  # and no list of parts: a client may send each byte by itself
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client went away", code="client_gone")
            part = message.get("body", b"")
            if len(received) + len(part) > most_bytes:
                raise self._too_large(most_bytes)
            if not self._room.take(len(part)):
                self.close_after = True
                raise unavailable("too many large requests are being received", "bodies_full")
            self._body_bytes += len(part)
            received += part
            if not message.get("more_body", False):
                return bytes(received)

    def _too_large(self, most_bytes: int) -> ApiError:
        self.close_after = True
        return ApiError(413, f"the body is over {most_bytes} bytes", code="request_too_large")

    async def _watch(self, callback: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.finished:
            callback()


def _never(data: bytes) -> bool:
    """Other servers than ours."""
    return False
