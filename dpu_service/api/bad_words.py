"""`bad_words`: words whose tokens are not sampled.

A word is banned by its tokens, bare and behind a space, so only one that is a single token both ways can be: what is
added to logits does not change with what came before. The same text made of other, smaller tokens stays possible.
"""

from __future__ import annotations

from dpu_service.api.errors import bad_value, unsupported
from dpu_service.text.bundle import TextBundle
from dpu_service.text.words import token_of

_SHOWN = 100


def read_bad_words(words: list[str], bundle: TextBundle, vocab_size: int) -> frozenset[int]:
    """The tokens to ban.

    Raises:
        ApiError: 400: a word without characters, or one that takes more than one token, bare or behind a space.
    """
    banned: set[int] = set()
    for number, word in enumerate(words):
        bare = word.lstrip(" ")
        if not bare:
            raise bad_value("bad_words", "'bad_words' must not contain an empty word")
        for form, what in ((bare, "without a space in front"), (" " + bare, "behind a space")):
            token = token_of(bundle, form)
            if token is None or token >= vocab_size:
                raise unsupported(f"bad_words[{number}]", _refusal(bare, what))
            banned.add(token)
    return frozenset(banned)


def _refusal(word: str, what: str) -> str:
    shown = word if len(word) <= _SHOWN else word[:_SHOWN] + "…"
    return f"'bad_words': '{shown}' takes more than one token {what}; only words of one token can be banned"
