"""Where the news of one request's sequences meet whoever answers the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from blink_proto.arena import Finish
from dpu_service.channel.logprobs import Logprob
from dpu_service.sequences.errors import SequencesError


@dataclass(slots=True)
class Tokens:
    """New tokens of the sequence with this number in the request; `finish` other than NONE is its last word.

    `logprobs` and `prompt_logprobs` are those of `News`.
    """

    number: int
    tokens: list[int]
    finish: Finish
    logprobs: list[list[Logprob]] = field(default_factory=list)
    prompt_logprobs: list[list[Logprob]] = field(default_factory=list)


class Listener(Protocol):
    """Is told of news within the pump's turn: first every listener to take them, then every one to send.

    One kind of work after the other for many streams, because the processor's caches hold one at a time (see
    `pump.TOGETHER`; 1 shows what it is worth). Neither method may raise.
    """

    def take_news(self) -> None:
        """There is something in the inbox."""

    def send(self) -> None:
        """All have taken theirs."""


def _nothing() -> None:
    """Nobody wants to know."""


class Inbox:
    """Filled by the pump, emptied by one reader: a coroutine that waits in `take`, or a listener that `take_now`s.

    A failure goes before everything that is still in it.

    Args:
        on_start: called for each of the request's sequences when it has its first token, or has ended without.
    """

    def __init__(self, on_start: Callable[[], None] = _nothing) -> None:
        self.on_start = on_start
        self._items: list[Tokens] = []
        self._failure: SequencesError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Listener | None = None

    @property
    def failed(self) -> bool:
        """Whether the request has been told that it is over."""
        return self._failure is not None

    def put(self, item: Tokens) -> None:
        """Adds news; `tell` and `send_out` make them known."""
        self._items.append(item)

    def tell(self) -> None:
        """Wakes who waits, or tells the listener."""
        if self._listener is not None:
            self._listener.take_news()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send_out(self) -> None:
        """See `Listener.send`."""
        if self._listener is not None:
            self._listener.send()

    def fail(self, failure: SequencesError) -> None:
        """Ends the request with an error; the first one counts."""
        if self._failure is None:
            self._failure = failure
            self.tell()
            self.send_out()

    def listen(self, listener: Listener | None) -> None:
        """Tells it of all that comes from now on."""
        self._listener = listener

    async def take(self) -> list[Tokens]:
        """All news since the last call; waits for some.

        Raises:
            SequencesError: the request is over.
        """
        while not self._items and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_now()

    def take_now(self) -> list[Tokens]:
        """All news since the last call, or none.

        Raises:
            SequencesError: the request is over.
        """
        if self._failure is not None:
            raise self._failure
        items, self._items = self._items, []
        return items
