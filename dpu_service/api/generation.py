"""Runs the sequences of one request and turns their tokens into pieces of text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from blink_proto.arena import Finish
from dpu_service import metrics
from dpu_service.api.answers import Piece
from dpu_service.api.logprobs import Entry
from dpu_service.channel.logprobs import Logprob
from dpu_service.sequences.inbox import Inbox, Tokens
from dpu_service.sequences.pump import Running, Wanted
from dpu_service.service import Serving
from dpu_service.text.choice import ChoiceText


@dataclass(frozen=True)
class Plan:
    """A checked request. `wanted` gives the choices in order: index = prompt · n + choice."""

    wanted: list[Wanted]
    stops: list[str]
    skip_special: bool
    min_tokens: int = 0
    logprobs: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(one.prompt) for one in self.wanted)


class Generation:
    """The running choices of a request. Always `close` it: whatever still runs is then cancelled.

    Args:
        arrived: when the request came, by the monotonic clock.

    Raises:
        SequencesError: the device takes no (more) sequences now.
    """

    def __init__(self, serving: Serving, plan: Plan, inbox: Inbox, arrived: float) -> None:
        self._pump = serving.pump
        self._inbox = inbox
        self._arrived = arrived
        self._sequences: list[Running] = serving.pump.request(plan.wanted, inbox)
        bundle = serving.encoder.bundle
        self._choices = [
            ChoiceText(bundle.detokenizer(plan.skip_special), plan.stops, plan.min_tokens, places=plan.logprobs)
            for _ in self._sequences
        ]
        self._logprobs: list[deque[list[Logprob]]] = [deque() for _ in self._sequences]
        self._latest = [0.0] * len(self._choices)
        self._open = len(self._choices)
        metrics.PROMPT_TOKENS.inc(plan.prompt_tokens)

    @property
    def over(self) -> bool:
        """Whether every choice has its finish reason."""
        return self._open == 0

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.tokens for choice in self._choices)

    async def next(self) -> list[Piece]:
        """The news since the last call, at most one piece for each choice and none that says nothing.

        Raises:
            SequencesError: the request is over before its choices are.
        """
        return self._pieces(await self._inbox.take())

    def take_now(self) -> list[Piece]:
        """As `next`, without waiting: maybe nothing.

        Raises:
            SequencesError: the request is over before its choices are.
        """
        return self._pieces(self._inbox.take_now())

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """See `Inbox.listen`."""
        self._inbox.listen(on_news)

    def close(self) -> None:
        """Cancels what still runs."""
        self._pump.abandon(self._sequences)
        metrics.COMPLETION_TOKENS.inc(self.completion_tokens)

    def _pieces(self, items: list[Tokens]) -> list[Piece]:
        pieces: dict[int, Piece] = {}
        for item in items:
            self._measure(item)
            if self._choices[item.number].finish_reason is not None:
                continue
            piece, earlier = self._feed(item), pieces.get(item.number)
            if earlier is None:
                pieces[item.number] = piece
            else:
                earlier.add(piece)
        return [piece for piece in pieces.values() if piece.says_something]

    def _feed(self, item: Tokens) -> Piece:
        choice, logprobs = self._choices[item.number], self._logprobs[item.number]
        text = choice.feed(item.tokens, item.finish)
        logprobs.extend(item.logprobs)
        entries = [Entry(offset, logprobs.popleft()) for offset in choice.take_places()]
        if choice.finish_reason is not None:
            self._open -= 1
        if choice.stopped_by_text and item.finish is Finish.NONE:
            self._pump.abandon([self._sequences[item.number]])
        return Piece(item.number, text, choice.finish_reason, entries)

    def _measure(self, item: Tokens) -> None:
        if not item.tokens:
            return
        now = time.monotonic()
        before = self._latest[item.number]
        self._latest[item.number] = now
        if not before:
            metrics.FIRST_TOKEN_SECONDS.observe(now - self._arrived)
            return
        for _ in item.tokens:
            metrics.INTER_TOKEN_SECONDS.observe((now - before) / len(item.tokens))
