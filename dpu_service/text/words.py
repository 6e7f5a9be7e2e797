"""Words and the tokens that make them up."""

from __future__ import annotations

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


def tokens_of_word(bundle: TextBundle, word: str) -> frozenset[int] | None:
    """Tokens without which neither the word nor the word behind a space can be written as the tokenizer writes it;
    None where there are no such tokens, because a form takes several that other words have too."""
    bare, spaced = token_of(bundle, word), token_of(bundle, " " + word)
    if bare is None:
        return None
    if spaced is not None:
        return frozenset((bare, spaced))
    (encoding,) = bundle.tokenizer.encode_batch_fast([" " + word], add_special_tokens=False)
    return frozenset((bare,)) if bare in encoding.ids else None
