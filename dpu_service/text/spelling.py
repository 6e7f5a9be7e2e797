"""Single tokens as bytes, control tokens included."""

from __future__ import annotations

import re
from typing import Protocol

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How vocabularies with byte fallback name the token of a byte."""


class Spelling(Protocol):
    """Bytes of a token; they need not be UTF-8. Empty for an id that the tokenizer does not have."""

    def __call__(self, token: int) -> bytes: ...


class TableSpelling:
    """For byte-level vocabularies.

    Args:
        table: bytes of each token id.
    """

    def __init__(self, table: list[bytes]) -> None:
        self._table = table

    def __call__(self, token: int) -> bytes:
        """See `Spelling`."""
        return self._table[token] if token < len(self._table) else b""


class DecoderSpelling:
    """For any other tokenizer: what it decodes a token to behind another one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """See `Spelling`."""
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def _spell(self, token: int) -> bytes:
        name: str | None = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        alone = self._decode([token])
        byte = _BYTE.fullmatch(name)
        if byte and alone != name:
            return bytes.fromhex(byte.group(1))
        # At the beginning decoders strip a space, so the token's own is seen in the second of two.
        return self._decode([token, token])[len(alone) :].encode()

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
