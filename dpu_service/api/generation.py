"""Runs the sequences of one request and turns their tokens into pieces of text."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import groupby

from blink_proto.arena import Finish
from dpu_service import metrics
from dpu_service.api.answering import Answering
from dpu_service.api.answers import Piece
from dpu_service.api.echo import Echo
from dpu_service.api.logprobs import Asked
from dpu_service.channel.news import News
from dpu_service.runtimes import Serving
from dpu_service.sequences.inbox import Inbox, Item, Listener
from dpu_service.sequences.pump import Running, Wanted
from dpu_service.text.bundle import TextBundle
from dpu_service.text.choice import ChoiceText, TextRules
from dpu_service.text.places import TokenPlaces
from dpu_service.text.tools.pieces import ToolParser


@dataclass(frozen=True)
class Plan:
    """A checked request. `wanted` gives the choices in order: index = prompt · choices of each + choice.

    Attributes:
        continues: the answers' text continues that of their prompts.
        echoes: what stands in front of the answers, one for each of `wanted`, or none.
        only_prompt: no tokens are wanted.
        kept: choices of each prompt that are answered, the best ones; 0 for all.
        parser: makes one for each choice, to find tool calls; None where none are looked for.
    """

    wanted: list[Wanted]
    rules: TextRules = field(default_factory=TextRules)
    asked: Asked = field(default_factory=Asked)
    continues: bool = False
    echoes: list[Echo] = field(default_factory=list)
    only_prompt: bool = False
    kept: int = 0
    parser: Callable[[], ToolParser] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(one.prompt) for one in self.wanted)

    @property
    def choices(self) -> int:
        """Choices that are made."""
        return sum(len(one.samplings) for one in self.wanted)

    @property
    def most_tokens(self) -> int:
        """That all choices together may have."""
        return sum(sampling.max_tokens for one in self.wanted for sampling in one.samplings)

    def answerings(self, bundle: TextBundle) -> list[Answering]:
        """Fresh ones for all choices."""
        return [
            self._answering(bundle, number, one.prompt, self.echoes[i] if self.echoes else None)
            for number, (i, one) in enumerate((i, one) for i, one in enumerate(self.wanted) for _ in one.samplings)
        ]

    def _answering(self, bundle: TextBundle, number: int, prompt: Items[int], echo: Echo | None) -> Answering:
        detokenizer = bundle.detokenizer(self.rules.skip_special, self.rules.markers)
        if self.continues:
            detokenizer.follow(prompt, shown=echo is not None)
        places = TokenPlaces(len(echo.text) if echo else 0) if self.asked.shown else None
        text = ChoiceText(detokenizer, self.rules, places, place_last=echo is not None)
        return Answering(number, text, self.asked, echo, self.only_prompt, self.parser() if self.parser else None)


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
        self._choices = plan.answerings(serving.encoder.bundle)
        self._first = [0.0] * len(self._choices)
        self._latest = [0.0] * len(self._choices)
        self._open = len(self._choices)
        metrics.PROMPT_TOKENS.inc(plan.prompt_tokens)
        metrics.REQUEST_PROMPT_TOKENS.observe(plan.prompt_tokens)

    @property
    def over(self) -> bool:
        """Whether every choice has its finish reason."""
        return self._open == 0

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.text.tokens for choice in self._choices)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that none of their choices had to compute, as far as choices have begun."""
        by_prompt = groupby(self._sequences, key=lambda each: id(each.prompt))
        known = ([each.cached for each in choices if each.cached is not None] for _, choices in by_prompt)
        return sum(min(found, default=0) for found in known)

    @property
    def mean_logprobs(self) -> list[float]:
        """Of each choice (see `Answering.mean_logprob`)."""
        return [choice.mean_logprob for choice in self._choices]

    async def next(self) -> list[Piece]:
        """The news since the last call, at most one piece for each choice and none that says nothing.

        Raises:
            SequencesError: the request is over before its choices are.
        """
        return self.feed(await self._inbox.take())

    def take_now(self) -> list[Piece]:
        """As `next`, without waiting: maybe nothing.

        Raises:
            SequencesError: the request is over before its choices are.
        """
        return self.feed(self._inbox.take_now())

    def feed(self, items: list[Item]) -> list[Piece]:
        """What these news make known."""
        pieces: dict[int, Piece] = {}
        for number, news in items:
            if news.tokens:
                before, self._latest[number] = self._latest[number], time.monotonic()
                self._measure(number, before, self._latest[number], len(news.tokens))
            if self._choices[number].over:
                continue
            piece, earlier = self._feed(number, news), pieces.get(number)
            if earlier is None:
                pieces[number] = piece
            else:
                earlier.add(piece)
        return [piece for piece in pieces.values() if piece.says_something]

    @property
    def quiet(self) -> bool:
        """Whether `take_now` would bring nothing, not even an error."""
        return self._inbox.quiet

    def plain_text(self, number: int, news: News) -> str | None:
        """The quick way: text of news that bring nothing but text; None, and nothing done, where `feed` has to see."""
        choice, tokens = self._choices[number], news.tokens
        decode = choice.decode
        if decode is None or not tokens or news.finish is not Finish.NONE:
            return None
        now = time.monotonic()
        before, self._latest[number] = self._latest[number], now
        if before and len(tokens) == 1:
            metrics.INTER_TOKENS.add_one(now - before)
        else:
            self._measure(number, before, now, len(tokens))
        choice.text.tokens += len(tokens)
        return decode(tokens)

    def listen(self, listener: Listener | None) -> None:
        """See `Inbox.listen`."""
        self._inbox.listen(listener)

    def cancel(self) -> None:
        """Ends on the device what still runs."""
        self._pump.abandon(self._sequences)

    def close(self) -> None:
        """Cancels what still runs."""
        self.cancel()
        metrics.COMPLETION_TOKENS.inc(self.completion_tokens)
        metrics.REQUEST_COMPLETION_TOKENS.observe(self.completion_tokens)
        for choice, first, latest in zip(self._choices, self._first, self._latest, strict=True):
            if choice.text.tokens > 1:
                metrics.OUTPUT_TOKEN_SECONDS.observe((latest - first) / (choice.text.tokens - 1))

    def _feed(self, number: int, news: News) -> Piece:
        choice = self._choices[number]
        piece = choice.feed(news)
        if choice.over:
            self._open -= 1
            if news.finish is Finish.NONE:  # the device does not know
                self._pump.abandon([self._sequences[number]])
        return piece

    def _measure(self, number: int, before: float, now: float, tokens: int) -> None:
        if before:
            metrics.INTER_TOKENS.add((now - before) / tokens, tokens)
        else:
            self._first[number] = now
            metrics.FIRST_TOKEN_SECONDS.observe(now - self._arrived)
