"""`bad_words`: words whose tokens are not sampled.

What is added to logits does not change with what came before, so a word can be banned only where a single token is
it: bare, and behind a space. The same text made of other, smaller tokens stays possible.
"""

from __future__ import annotations

from dpu_service.api.errors import bad_value, unsupported
from dpu_service.text.bundle import TextBundle
from dpu_service.text.words import tokens_of_word

_LONGEST = 256


def read_bad_words(words: list[str], bundle: TextBundle, vocab_size: int) -> frozenset[int]:
    """The tokens to ban.

    Raises:
        ApiError: 400: a word without characters, or one that takes more than one token, bare or behind a space.
    """
    banned: frozenset[int] = frozenset()
    for number, word in enumerate(words):
        bare = word.lstrip(" ")
        if not bare:
            raise bad_value("bad_words", "'bad_words' must not contain an empty word")
        tokens = tokens_of_word(bundle, bare) if len(bare) <= _LONGEST else None
        if tokens is None or max(tokens) >= vocab_size:
            raise _several_tokens(number, bare)
        banned |= tokens
    return banned


def _several_tokens(number: int, word: str) -> Exception:
    shown = word if len(word) <= _LONGEST else word[:_LONGEST] + "…"
    reason = "takes more than one token, bare or behind a space; only words of one token can be banned"
    return unsupported(f"bad_words[{number}]", f"'bad_words[{number}]': '{shown}' {reason}")
