"""Where the news of one request's sequences meet whoever answers the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

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


class Inbox:
    """Filled by the pump, emptied by one reader: a coroutine that waits in `take`, or a callback that `take_now`s.

    A failure goes before everything that is still in it.
    """

    def __init__(self) -> None:
        self._items: list[Tokens] = []
        self._failure: SequencesError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_news: Callable[[], None] | None = None

    @property
    def failed(self) -> bool:
        """Whether the request has been told that it is over."""
        return self._failure is not None

    def put(self, item: Tokens) -> None:
        """Adds news."""
        self._items.append(item)
        self._wake()

    def fail(self, failure: SequencesError) -> None:
        """Ends the request with an error; the first one counts."""
        if self._failure is None:
            self._failure = failure
            self._wake()

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Calls back at once for all that comes, within the pump's turn; the callback must not raise."""
        self._on_news = on_news

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

    def _wake(self) -> None:
        if self._on_news is not None:
            self._on_news()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
