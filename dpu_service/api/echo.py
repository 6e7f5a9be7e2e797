"""What `echo` puts in front of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from dpu_service.api.logprobs import Entry
from dpu_service.channel.logprobs import Logprob
from dpu_service.text.bundle import TextBundle
from dpu_service.text.places import TokenPlaces


@dataclass(frozen=True)
class Echo:
    """A prompt's text and where the text of each of its tokens begins in it."""

    text: str
    tokens: list[int]
    offsets: list[int]

    def part(self, first: int, logprobs: list[list[Logprob]]) -> tuple[str, list[Entry]]:
        """Text and entries of some of the tokens.

        Args:
            first: the first of them.
            logprobs: of each of them; nothing of the prompt's first token.
        """
        last = first + len(logprobs)
        end = self.offsets[last] if last < len(self.offsets) else len(self.text)
        places, tokens = self.offsets[first:last], self.tokens[first:last]
        return self.text[self.offsets[first] : end], [Entry(*one) for one in zip(places, tokens, logprobs, strict=True)]


def echo_of(bundle: TextBundle, tokens: list[int], text: str | None, skip_special: bool) -> Echo:
    """The echo of a prompt. May take long; safe to call in another thread.

    Args:
        text: as the client wrote it; None where it gave token ids, whose text is decoded. A character that ids begin
            and do not end is not part of it: the answer begins with it.
    """
    detokenizer, places = bundle.detokenizer(skip_special and text is None), TokenPlaces()
    silent = _in_front(bundle, tokens, text)
    pieces = []
    for number, token in enumerate(tokens):
        pieces.append("" if number < silent else detokenizer.feed([token]))
        places.note(pieces[-1], detokenizer.holds)
    places.show("", over=True)
    shown = "".join(pieces) if text is None else text
    return Echo(shown, tokens, [min(offset, len(shown)) for offset in places.take()])


def _in_front(bundle: TextBundle, tokens: list[int], text: str | None) -> int:
    """Tokens that the tokenizer put in front of a text: its BOS, unless the client wrote it."""
    bos = bundle.control_tokens.get(bundle.bos_token)
    return int(text is not None and bos is not None and tokens[:1] == [bos] and not text.startswith(bundle.bos_token))
