"""Texts that are single tokens."""

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
