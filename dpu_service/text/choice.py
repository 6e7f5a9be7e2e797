"""The text of one choice: detokenizer and stop strings together."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from blink_proto.arena import Finish
from dpu_service.text.detokenize import Detokenizer
from dpu_service.text.places import TokenPlaces
from dpu_service.text.stops import StopStrings

_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True)
class TextRules:
    """What becomes text and what ends it.

    Attributes:
        min_tokens: stop strings are looked for only in the text of the tokens after so many.
        keep_stop: the stop string, or the text of the token that made the device stop, is part of the text.
        skip_special: control tokens have no text, but for the markers.
    """

    stops: Items[str] = ()
    min_tokens: int = 0
    keep_stop: bool = False
    skip_special: bool = True
    markers: frozenset[int] = frozenset()


class ChoiceText:
    """Turns the tokens of one sequence into text.

    `finish_reason` is set once the choice is over, `stopped_by_text` when a stop string ended it (the device does
    not know and has to be told).

    Args:
        places: `take_places` is wanted, which takes them from there; None where it is not.
        place_last: they are to have that of the token that made the device stop, too.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        rules: TextRules,
        places: TokenPlaces | None = None,
        *,
        place_last: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._places = places
        self._place_last = place_last
        self._keep_stop = rules.keep_stop
        self._min_tokens = rules.min_tokens
        self._stops = StopStrings(rules.stops, rules.keep_stop) if rules.stops else None
        self._plain = self._stops is None and places is None
        self.finish_reason: str | None = None
        self.stopped_by_text = False
        self.tokens = 0

    def feed(self, tokens: list[int], finish: Finish) -> str:
        """Text that may be shown after these tokens. The token that made the device stop is counted, and not shown
        unless `keep_stop` says so."""
        if self.finish_reason is not None:
            return ""
        if self._plain and finish is Finish.NONE:
            self.tokens += len(tokens)
            return self._detokenizer.feed(tokens)
        hides_last = finish is Finish.STOP and not self._keep_stop
        text = self._take(tokens[:-1] if hides_last else tokens)
        self._note_stop()
        if self.finish_reason is None and finish is not Finish.NONE:
            text += self._finish(_REASONS[finish])
        if self.finish_reason is None or not self.stopped_by_text:
            self.tokens += len(tokens)
            if hides_last and tokens and self._place_last and self._places is not None:
                self._places.note("", False)
        if self._places is not None:
            self._places.show(text, over=self.finish_reason is not None)
        return text

    @property
    def decode(self) -> Callable[[list[int]], str] | None:
        """What `feed` calls, and adds to `tokens`, as long as the device goes on; None where there is more to do."""
        return self._detokenizer.feed if self._plain else None

    @property
    def may_end(self) -> bool:
        """Whether so many tokens have come as were wanted at least."""
        return self.tokens >= self._min_tokens

    def end(self, reason: str) -> None:
        """Over before the device is: no more is wanted."""
        self.finish_reason = reason
        if self._places is not None:
            self._places.show("", over=True)

    def take_places(self) -> list[int]:
        """Where the text of further tokens begins (see `TokenPlaces.take`): of every counted token once and in order,
        but not of the one that made the device stop, unless it is shown or `place_last` says so."""
        return [] if self._places is None else self._places.take()

    def _take(self, tokens: list[int]) -> str:
        if self._stops is None and self._places is None:
            return self._detokenizer.feed(tokens)
        pieces: list[str] = []
        for token in tokens:  # one by one, so that tokens behind a stop string are not counted
            text = self._decode(token)
            looked_at = self._stops if self.tokens + len(pieces) >= self._min_tokens else None
            pieces.append(text if looked_at is None else looked_at.feed(text))
            if looked_at is not None and looked_at.matched is not None:
                self.stopped_by_text = True
                self.tokens += len(pieces)
                break
        return "".join(pieces)

    def _decode(self, token: int) -> str:
        text = self._detokenizer.feed([token])
        if self._places is not None:
            self._places.note(text, self._detokenizer.holds)
        return text

    def _note_stop(self) -> None:
        if self.stopped_by_text:
            self.finish_reason = "stop"

    def _finish(self, reason: str) -> str:
        rest = self._detokenizer.flush()
        self.finish_reason = reason
        if self._stops is None:
            return rest
        text = self._stops.feed(rest)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
            return text
        return text + self._stops.flush()
