"""`bad_words`: words that are not generated, bare and behind a space.

Where one token is such a form, the token is not sampled at all. Where several are, the last one is not sampled when the
answer so far ends in the others; what stands in the prompt does not count. The same text made of other tokens than the
tokenizer writes it with stays possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from blink_proto import arena
from dpu_service.api.errors import bad_value
from dpu_service.text.encoder import TextEncoder
from dpu_service.text.words import forms_of_word

LONGEST_WORD = 256
"""Characters."""
_WORD_COST = 32
"""Looking for a word's forms, in characters tokenised, beside twice its own."""


@dataclass(frozen=True)
class Banned:
    """Single tokens, and sequences of two tokens or more."""

    tokens: frozenset[int] = frozenset()
    sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def words(self) -> int:
        """What the sequences take in the prompt heap."""
        return sum(1 + len(sequence) for sequence in self.sequences)


NOTHING = Banned()


async def read_bad_words(words: list[str], encoder: TextEncoder, vocab_size: int) -> Banned:
    """What to ban.

    Raises:
        ApiError: 400: a word is empty, too long or nothing that the model could write, or they take too many tokens.
    """
    if not words:
        return NOTHING
    bare = [_checked(number, word) for number, word in enumerate(words)]
    cost = sum(_WORD_COST + 2 * len(word) for word in bare)
    return await encoder.run(cost, partial(_find, bare, encoder, vocab_size))


def _checked(number: int, word: str) -> str:
    bare = word.lstrip(" ")
    if not bare:
        raise bad_value("bad_words", "'bad_words' must not contain an empty word")
    if len(word) > LONGEST_WORD:
        raise bad_value(f"bad_words[{number}]", f"'bad_words[{number}]' may have at most {LONGEST_WORD} characters")
    return bare


def _find(words: list[str], encoder: TextEncoder, vocab_size: int) -> Banned:
    tokens: set[int] = set()
    sequences: dict[tuple[int, ...], None] = {}
    left = arena.MAX_BAN_WORDS
    for number, word in enumerate(words):
        forms = [form for form in forms_of_word(encoder.bundle, word) if max(form) < vocab_size]
        if not forms:
            name = f"bad_words[{number}]"
            raise bad_value(name, f"'{name}': '{word}' is nothing that this model's tokens can spell")
        tokens |= {form[0] for form in forms if len(form) == 1}
        new = [form for form in forms if len(form) > 1 and form not in sequences]
        sequences |= dict.fromkeys(new)
        left -= sum(1 + len(form) for form in new)
        if left < 0:
            most = f"of words of several tokens, tokens and words together may be {arena.MAX_BAN_WORDS}"
            raise bad_value("bad_words", f"'bad_words' take too many tokens: {most}")
    return Banned(frozenset(tokens), tuple(one for one in sequences if tokens.isdisjoint(one)))
