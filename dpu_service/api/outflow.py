"""The events of a stream, from its sequences' news to the socket."""

from __future__ import annotations

import asyncio

from dpu_service.api.answers import Piece, Shape
from dpu_service.api.exchange import Exchange
from dpu_service.api.generation import Generation


class Outflow:
    """Writes events within the pump's turn (see `Listener`), so that no task is switched to for a token.

    While the client is slow to read, news stays where it is, unrendered, and the stream's own task waits instead.
    """

    def __init__(self, exchange: Exchange, generation: Generation, shape: Shape) -> None:
        self._exchange = exchange
        self._generation = generation
        self._shape = shape
        self._unsent = b""
        self._waiter: asyncio.Future[None] | None = None

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
                if not self._unsent and not self._generation.over:
                    await self._until_stuck()
        finally:
            self._generation.listen(None)
        return self._unsent

    def take_news(self) -> None:
        """See `Listener`."""
        if self._waiter is None or self._waiter.done():
            return  # the task is busy, and looks for news itself
        try:
            self._unsent += self._render(self._generation.take_now())
        except Exception as error:
            self._waiter.set_exception(error)

    def send(self) -> None:
        """See `Listener`."""
        if self._waiter is None or self._waiter.done():
            return
        if self._generation.over:
            self._waiter.set_result(None)
        elif self._unsent:
            if self._exchange.write_now(self._unsent):
                self._unsent = b""
            else:
                self._waiter.set_result(None)

    async def _until_stuck(self) -> None:
        """Until news cannot be written at once, or is the last."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _render(self, pieces: list[Piece]) -> bytes:
        return b"".join([self._shape.chunk(piece) for piece in pieces])
