"""Token ids to text, piece by piece, without ever showing half a character."""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import Tokenizer

_HALF = "\N{REPLACEMENT CHARACTER}"
_LONGEST_HOLD = 4
"""Tokens of one character at most, when each token is one byte; text that is still broken then stays broken."""
_CONTEXT = 2
"""Groups of tokens (each complete characters) that are decoded before the new ones, for decoders that look back."""


class Detokenizer(Protocol):
    """Text of one sequence."""

    def feed(self, tokens: list[int]) -> str:
        """Text that is complete with these tokens."""

    def flush(self) -> str:
        """What is left, when no more tokens come: bytes that are no character become U+FFFD."""

    @property
    def holds(self) -> bool:
        """Whether the tokens so far end within a character."""


class ByteDetokenizer:
    """For byte-level vocabularies: bytes of each token through an incremental UTF-8 decoder.

    Args:
        table: bytes of each token id; ids without an entry are silent.
    """

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: list[int]) -> str:
        """See `Detokenizer`."""
        table = self._table
        return self._decoder.decode(b"".join([table[token] for token in tokens if token < len(table)]))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", final=True)

    @property
    def holds(self) -> bool:
        """See `Detokenizer`."""
        return self._decoder.getstate()[0] != b""


class WindowDetokenizer:
    """For any other tokenizer: decodes a window of recent tokens and takes the difference.

    Args:
        silent: ids of control tokens, where they are left out.
    """

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._shown: list[list[int]] = []
        self._pending: list[int] = []

    def feed(self, tokens: list[int]) -> str:
        """See `Detokenizer`."""
        return "".join([self._step(token) for token in tokens if token not in self._silent])

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._show() if self._pending else ""

    @property
    def holds(self) -> bool:
        """See `Detokenizer`."""
        return bool(self._pending)

    def _step(self, token: int) -> str:
        self._pending.append(token)
        if self._decode(self._pending).endswith(_HALF) and len(self._pending) < _LONGEST_HOLD:
            return ""
        return self._show()

    def _show(self) -> str:
        context = [token for group in self._shown for token in group]
        text = self._decode(context + self._pending)[len(self._decode(context)) :]
        self._shown = [*self._shown, self._pending][-_CONTEXT:]
        self._pending = []
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
