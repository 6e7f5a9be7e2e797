"""Where the news of one request's sequences meet whoever answers the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from dpu_service.channel.news import News
from dpu_service.sequences.errors import SequencesError

Item = tuple[int, News]
"""A sequence's number in the request, from 0, and what came of it."""


class Listener(Protocol):
    """Is told of news within the pump's turn: first every listener to take them, then every one to send.

    One kind of work after the other for many streams, because the processor's caches hold one at a time (see
    `pump.TOGETHER`; 1 shows what it is worth). No method may raise.
    """

    def take(self, number: int, news: News) -> bool:
        """News of the sequence with this number in the request; False where they have to wait in the inbox."""

    def send(self) -> None:
        """All have taken theirs."""

    def stop(self) -> None:
        """The request has failed: the inbox tells why."""


def _nothing() -> None:
    """Nobody wants to know."""


class Inbox:
    """Filled by the pump, emptied by one reader: a coroutine that waits in `take`, or a listener that is given the news
    while it can take them.

    Args:
        on_start: called for each of the request's sequences when it has its first token, or has ended without.
    """

    __slots__ = ("_failure", "_items", "_listener", "_waiter", "on_start")

    def __init__(self, on_start: Callable[[], None] = _nothing) -> None:
        self.on_start = on_start
        self._items: list[Item] = []
        self._failure: SequencesError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Listener | None = None

    @property
    def failed(self) -> bool:
        """Whether the request has been told that it is over."""
        return self._failure is not None

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to take, not even a failure."""
        return not self._items and self._failure is None

    def put(self, number: int, news: News) -> Listener | None:
        """Adds news of a sequence; who took them and is to be told to send, if anybody did."""
        listener = self._listener
        if listener is not None and listener.take(number, news):
            return listener
        self._items.append((number, news))
        self._wake()
        return None

    def fail(self, failure: SequencesError) -> None:
        """Ends the request with an error, behind the news that are here; the first one counts."""
        if self._failure is not None:
            return
        self._failure = failure
        if self._listener is not None:
            self._listener.stop()
        self._wake()

    def listen(self, listener: Listener | None) -> None:
        """Gives it all that comes from now on."""
        self._listener = listener

    async def take(self) -> list[Item]:
        """All news since the last call; waits for some.

        Raises:
            SequencesError: the request is over.
        """
        while self.quiet:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_now()

    def take_now(self) -> list[Item]:
        """All news since the last call, or none.

        Raises:
            SequencesError: the request is over.
        """
        items, self._items = self._items, []
        if not items and self._failure is not None:
            raise self._failure
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
