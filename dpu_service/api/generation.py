"""Runs the sequences of one request and turns their tokens into pieces of text."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from blink_proto.arena import Finish
from dpu_service import metrics
from dpu_service.api.answering import Answering
from dpu_service.api.answers import Piece
from dpu_service.api.echo import Echo
from dpu_service.api.logprobs import Asked
from dpu_service.runtimes import Serving
from dpu_service.sequences.inbox import Inbox, Listener, Tokens
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

    def feed(self, items: list[Tokens]) -> list[Piece]:
        """What these news make known."""
        if len(items) == 1 and not self._choices[items[0].number].over:  # nearly always
            self._measure(items[0])
            piece = self._feed(items[0])
            return [piece] if piece.says_something else []
        pieces: dict[int, Piece] = {}
        for item in items:
            self._measure(item)
            if self._choices[item.number].over:
                continue
            piece, earlier = self._feed(item), pieces.get(item.number)
            if earlier is None:
                pieces[item.number] = piece
            else:
                earlier.add(piece)
        return [piece for piece in pieces.values() if piece.says_something]

    @property
    def quiet(self) -> bool:
        """Whether `take_now` would bring nothing, not even an error."""
        return self._inbox.quiet

    def plain_text(self, item: Tokens) -> str | None:
        """The quick way: text of news that bring nothing but text; None, and nothing done, where `feed` has to see."""
        choice = self._choices[item.number]
        if not choice.plain or item.finish is not Finish.NONE:
            return None
        self._measure(item)
        return choice.text.feed(item.tokens, item.finish)

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

    def _feed(self, item: Tokens) -> Piece:
        choice = self._choices[item.number]
        piece = choice.feed(item)
        if choice.over:
            self._open -= 1
            if item.finish is Finish.NONE:  # the device does not know
                self._pump.abandon([self._sequences[item.number]])
        return piece

    def _measure(self, item: Tokens) -> None:
        if not item.tokens:
            return
        now = time.monotonic()
        before = self._latest[item.number]
        self._latest[item.number] = now
        if not before:
            self._first[item.number] = now
            metrics.FIRST_TOKEN_SECONDS.observe(now - self._arrived)
            return
        count = len(item.tokens)
        metrics.INTER_TOKENS.add((now - before) / count, count)
