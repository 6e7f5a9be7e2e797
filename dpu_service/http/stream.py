"""One request and its answer: ASGI on one side, a protocol on the other."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from dpu_service.api.exchange import WRITE_NOW
from dpu_service.http.host import Message

Headers = list[tuple[bytes, bytes]]


class Stream(ABC):
    """A protocol fills in the request and says when the client is gone; the application calls `receive` and `send`.

    `send` returns once the client's side has room for more, so an answer is never held in memory as a whole.
    """

    def __init__(self, scope: Message) -> None:
        self.scope = scope
        scope["extensions"] = {WRITE_NOW: self.write_now}
        self.gone = False
        """The client does not want the answer any more, or cannot be reached."""
        self.started = False
        self.finished = False
        self.body_over = False
        self._body = bytearray()
        self._body_told = False
        self._news = asyncio.Event()

    @property
    def buffered(self) -> int:
        """Bytes of the body that the application has not taken."""
        return len(self._body)

    def feed(self, data: bytes) -> None:
        """More of the request's body."""
        if not (self.finished or self.gone):
            self._body += data
            self._news.set()

    def drop_body(self) -> int:
        """Forgets what the application has not taken; so many bytes."""
        size = len(self._body)
        self._body.clear()
        return size

    def end_body(self) -> None:
        """The request is whole."""
        self.body_over = True
        self._news.set()

    def lose(self) -> None:
        """The client is gone."""
        self.gone = True
        self._body.clear()
        self._news.set()

    async def receive(self) -> Message:
        """See ASGI."""
        while not (self.gone or self.finished):
            if self._body or (self.body_over and not self._body_told):
                return self._take()
            self._news.clear()
            self._wants_more()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """See ASGI. What is sent to a client that is gone is dropped."""
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self.started = True
            self._head(message["status"], list(message.get("headers", [])))
            return
        last = not message.get("more_body", False)
        data = message.get("body", b"")
        await self._part(data if self.scope["method"] != "HEAD" else b"", last)
        if last and not self.gone:
            self.finished = True
            self._news.set()
            self._over()

    @abstractmethod
    def write_now(self, data: bytes) -> bool:
        """Sends a part of the answer that is not the last at once; False, with nothing sent, where `send` has to."""

    def done(self) -> None:
        """The application has returned."""
        if not (self.finished or self.gone):
            self._fail()

    def _take(self) -> Message:
        data = bytes(self._body)
        self._body.clear()
        self._body_told = self.body_over
        self._taken(len(data))
        return {"type": "http.request", "body": data, "more_body": not self.body_over}

    @abstractmethod
    def _head(self, status: int, headers: Headers) -> None:
        """Writes the head of the answer."""

    @abstractmethod
    async def _part(self, data: bytes, last: bool) -> None:
        """Writes a part of the answer; returns when there is room for another."""

    @abstractmethod
    def _over(self) -> None:
        """The answer is whole."""

    @abstractmethod
    def _fail(self) -> None:
        """There will be no (whole) answer."""

    def _wants_more(self) -> None:
        """The application waits for the body."""
        return

    def _taken(self, size: int) -> None:
        """The application has taken so many bytes of the body."""
        return
