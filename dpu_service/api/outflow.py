"""The events of a stream, from its sequences' news to the socket."""

from __future__ import annotations

import asyncio

import msgspec

from dpu_service.api.answers import Piece, Shape
from dpu_service.api.exchange import Exchange
from dpu_service.api.generation import Generation
from dpu_service.channel.news import News


class Outflow:
    """Writes events within the pump's turn (see `Listener`), so that no task is switched to for a token.

    While the client is slow to read, news stays where it is, unrendered, and the stream's own task waits instead.
    """

    __slots__ = ("_around", "_exchange", "_generation", "_shape", "_unsent", "_waiter", "_waiting", "_write_now")

    def __init__(self, exchange: Exchange, generation: Generation, shape: Shape) -> None:
        self._exchange = exchange
        self._write_now = exchange.write_now
        self._generation = generation
        self._shape = shape
        self._unsent = b""
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._waiter: asyncio.Future[None]
        self._waiting = False

    async def run(self, pieces: list[Piece]) -> bytes:
        """Streams these and all that follow. What is to be sent last is given back unsent.

        Raises:
            SequencesError: the request is over before its choices are.
        """
        self._unsent = self._render(pieces)
        self._generation.listen(self)
        try:
            while not self._generation.over:
                if self._unsent:
                    unsent, self._unsent = self._unsent, b""
                    await self._exchange.write(unsent)
                self._unsent = self._render(self._generation.take_now())
                if not self._unsent and not self._generation.over and self._generation.quiet:
                    await self._until_stuck()
        finally:
            self._generation.listen(None)
        return self._unsent

    def take(self, number: int, news: News) -> bool:
        """See `Listener`. Not while the task is busy: it looks for news itself."""
        if not self._waiting:
            return False
        try:
            text = self._generation.plain_text(number, news)
            around = self._around.get(number)
            if text is None:
                self._unsent += self._render(self._generation.feed([(number, news)]))
            elif around is None:
                self._unsent += self._first_event(number, text)
            elif text:
                self._unsent += b"%b%b%b" % (around[0], msgspec.json.encode(text), around[1])
        except Exception as error:
            self._wake(error)
        return True

    def send(self) -> None:
        """See `Listener`."""
        if not self._waiting:
            return
        if self._generation.over:
            self._wake()
        elif self._unsent:
            if self._write_now(self._unsent):
                self._unsent = b""
            else:
                self._wake()

    def stop(self) -> None:
        """See `Listener`. The task sends what is unsent before it asks why."""
        if self._waiting:
            self._wake()

    async def _until_stuck(self) -> None:
        """Until news cannot be written at once, or is the last."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._waiting = True
        try:
            await self._waiter
        finally:
            self._waiting = False

    def _wake(self, error: Exception | None = None) -> None:
        self._waiting = False
        if self._waiter.done():  # cancelled
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    def _first_event(self, number: int, text: str) -> bytes:
        """Which may have more to say than those behind it."""
        if not text:
            return b""
        self._around[number] = self._shape.around_text(number)
        return self._shape.chunk(Piece(number, text))

    def _render(self, pieces: list[Piece]) -> bytes:
        return b"".join([self._shape.chunk(piece) for piece in pieces])
