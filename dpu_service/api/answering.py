"""One choice on its way from tokens to pieces of an answer."""

from __future__ import annotations

from collections import deque

from blink_proto.arena import Finish
from dpu_service.api.answers import Piece
from dpu_service.api.echo import Echo
from dpu_service.api.logprobs import Asked, Entry
from dpu_service.channel.logprobs import Logprob
from dpu_service.channel.news import News
from dpu_service.text.choice import ChoiceText
from dpu_service.text.tools.pieces import ToolParser


class Answering:
    """Follows one choice.

    Args:
        text: gives places where log-probabilities are to be shown.
        echo: stands in front of the answer.
        only_prompt: the client wants no token; the device may generate one.
        parser: finds tool calls in the text; None where none are looked for.
    """

    def __init__(
        self,
        number: int,
        text: ChoiceText,
        asked: Asked,
        echo: Echo | None,
        only_prompt: bool,
        parser: ToolParser | None = None,
    ) -> None:
        self.text = text
        self._number = number
        self._asked = asked
        self._echo = echo
        self._only_prompt = only_prompt
        self._parser = parser
        self._plain = echo is None and parser is None and not only_prompt and asked == Asked()
        self.decode = text.decode if self._plain else None
        """See `ChoiceText`; where this says all that there is to say."""
        self._begun = False
        self._waiting: deque[tuple[int, list[Logprob]]] = deque()
        self._scored = 0
        self._of_prompt: list[list[Logprob]] = []
        self._sum = 0.0
        self._summed = 0

    @property
    def over(self) -> bool:
        """Whether it has its finish reason."""
        return self.text.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """Of the tokens that count; 0 where the device was not asked for any."""
        return self._sum / self._summed if self._summed else 0.0

    def feed(self, item: News) -> Piece:
        """What these tokens make known."""
        if self._plain:
            text = self.text.feed(item.tokens, item.finish)
            return Piece(self._number, text, self.text.finish_reason)
        piece = Piece(self._number)
        if item.prompt_logprobs:
            self._score(piece, item.prompt_logprobs)
        if not self._begun and (item.tokens or item.finish is not Finish.NONE):
            self._begin(piece)
        if not self.over:
            text = self.text.feed(item.tokens, item.finish)
            self._account(item)
            self._say(piece, text)
            piece.entries += [Entry(offset, *self._waiting.popleft()) for offset in self.text.take_places()]
        piece.finish_reason = self._finish_reason
        return piece

    @property
    def _finish_reason(self) -> str | None:
        called = self._parser is not None and self._parser.calls
        return "tool_calls" if called and self.text.finish_reason == "stop" else self.text.finish_reason

    def _say(self, piece: Piece, text: str) -> None:
        """Adds text, or what calls there are in it."""
        parser = self._parser
        if parser is None:
            piece.text += text
            return
        heard = parser.feed(text)
        if self.over:
            heard.add(parser.finish())
        elif parser.over and self.text.may_end:
            self.text.end("stop")
        piece.text += heard.content
        piece.calls += heard.calls

    def _score(self, piece: Piece, found: list[list[Logprob]]) -> None:
        """Log-probabilities of further tokens of the prompt; in a stream their part of the echo goes out at once."""
        asked, echo = self._asked, self._echo
        if asked.of_prompt:
            self._of_prompt += [one[: asked.of_prompt] for one in found]
        if echo is not None and asked.shown:
            known: list[list[Logprob]] = [] if self._scored else [[]]
            known += [one[: asked.shown] for one in found]
            text, entries = echo.part(self._scored, known)
            piece.text += text
            piece.entries += entries
            self._scored += len(known)

    def _begin(self, piece: Piece) -> None:
        """The prompt is through: all that is to be said of it is known."""
        self._begun = True
        asked, echo = self._asked, self._echo
        if echo is not None and not asked.shown:
            piece.text = echo.text
        elif echo is not None and not self._scored:  # a prompt of one token
            self._score(piece, [])
        if asked.of_prompt:
            piece.prompt_logprobs = self._of_prompt
        self._echo = None
        if self._only_prompt:
            self.text.end("length")

    def _account(self, item: News) -> None:
        shown = self._asked.shown
        if shown:
            self._waiting.extend((own[0].token, own[:shown]) for own in item.logprobs)
        if self._asked.ranked:
            counted = self.text.tokens - self._summed
            self._sum += sum(own[0].logprob for own in item.logprobs[:counted])
            self._summed += counted
