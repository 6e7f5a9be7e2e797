"""Words and the tokens that make them up."""

from __future__ import annotations

from collections.abc import Sequence

from dpu_service.text.bundle import TextBundle
from dpu_service.text.bytelevel import token_name
from dpu_service.text.tables import WORD_SPACE


def token_of(bundle: TextBundle, text: str) -> int | None:
    """The token whose own text is this, or None where there is none."""
    data = text.encode("utf-8", "replace")
    for name in (token_name(data), text.replace(" ", WORD_SPACE), text):
        token: int | None = bundle.tokenizer.token_to_id(name)
        if token is not None and bundle.spelling(token) == data:
            return token
    return None


def forms_of_word(bundle: TextBundle, word: str) -> list[tuple[int, ...]]:
    """The tokens that the tokenizer writes a word with, bare and behind a space: one form, both, or none where the
    vocabulary cannot spell it. A form that has the other one in it is left out: it cannot come without that one.

    Args:
        word: does not begin with a space.
    """
    return _forms(bundle, word) or _forms(bundle, _normalised(bundle, word))


def _forms(bundle: TextBundle, word: str) -> list[tuple[int, ...]]:
    # Some tokenizers put a space in front of every text, so that a bare word is seen only behind something else.
    bare = _form(bundle, word, (word, "\n" + word))
    spaced = _form(bundle, " " + word, (" " + word, word, "a " + word))
    if bare is None or spaced is None:
        return [form for form in (bare, spaced) if form is not None]
    return [bare] if _holds(spaced, bare) else [bare, spaced]


def _form(bundle: TextBundle, text: str, written: Sequence[str]) -> tuple[int, ...] | None:
    """The token that is this text, or the last ones that the tokenizer makes of one of `written` and that spell it."""
    single = token_of(bundle, text)
    if single is not None:
        return (single,)
    for whole in written:
        (encoding,) = bundle.tokenizer.encode_batch_fast([whole], add_special_tokens=False)
        tokens = _last_tokens(bundle, encoding.ids, text.encode("utf-8", "replace"))
        if tokens is not None:
            return tokens
    return None


def _last_tokens(bundle: TextBundle, tokens: list[int], data: bytes) -> tuple[int, ...] | None:
    """The last tokens that spell the data, where a token begins there."""
    at, left = len(tokens), len(data)
    while left > 0 and at > 0:
        at -= 1
        left -= len(bundle.spelling(tokens[at]))
    found = tokens[at:]
    return tuple(found) if b"".join(map(bundle.spelling, found)) == data else None


def _normalised(bundle: TextBundle, word: str) -> str:
    """The word as the tokenizer changes it first, composed or in lower case for example."""
    normalizer = bundle.tokenizer.normalizer
    changed = word if normalizer is None else str(normalizer.normalize_str(word))
    return changed.replace(WORD_SPACE, " ").lstrip(" ")


def _holds(form: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return any(form[at : at + len(other)] == other for at in range(len(form) - len(other) + 1))
