"""Token ids to text, piece by piece, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Items
from typing import Protocol

from tokenizers import Tokenizer

_HALF = "\N{REPLACEMENT CHARACTER}"
_LONGEST_BEGINNING = 3
"""Bytes of a character that is not yet whole, at most."""
_LONGEST_HOLD = 4
"""Tokens of one character at most, when each token is one byte; text that is still broken then stays broken."""
_CONTEXT_TOKENS = 8
"""Of a prompt, as context of its continuation."""
_CONTEXT = 2
"""Groups of tokens (each complete characters) that are decoded before the new ones, for decoders that look back."""


class Detokenizer(Protocol):
    """Text of one sequence."""

    def follow(self, prompt: Items[int], *, shown: bool = False) -> None:
        """The text is to continue that of a prompt: its first space stays, and a character that the prompt has begun
        comes whole. Before the first `feed` only.

        Args:
            shown: the prompt's text is shown in front: a character that it begins and nothing ends comes as U+FFFD;
                else it does not come.
        """

    def feed(self, tokens: list[int]) -> str:
        """Text that is complete with these tokens."""

    def flush(self) -> str:
        """What is left, when no more tokens come: bytes that are no character become U+FFFD."""

    @property
    def holds(self) -> bool:
        """Whether the tokens so far end within a character."""


class ByteDetokenizer:
    """For vocabularies with a table of bytes: those of each token through an incremental UTF-8 decoder.

    Args:
        table: bytes of each token id; ids without an entry are silent.
        strip: spaces that the beginning of the text loses.
    """

    def __init__(self, table: list[bytes], strip: int = 0) -> None:
        self._table = table
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._borrowed = b""
        self._clean = False
        """Whether nothing before the next token has to do with its text."""

    def follow(self, prompt: Items[int], *, shown: bool = False) -> None:
        """See `Detokenizer`."""
        tail = b""
        for token in reversed(prompt):
            tail = self._bytes_of(token) + tail
            if len(tail) > _LONGEST_BEGINNING:  # UTF-8 tells from any place on where characters begin
                break
        if tail:
            self._strip = 0
        self._decoder.decode(tail)
        self._borrowed = b"" if shown else self._decoder.getstate()[0]

    def feed(self, tokens: list[int]) -> str:
        """See `Detokenizer`."""
        table = self._table
        if len(tokens) == 1:
            data = table[tokens[0]] if tokens[0] < len(table) else b""
        else:
            data = b"".join([table[token] for token in tokens if token < len(table)])
        if self._clean:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass  # a part of a character, or none
        if self._borrowed and data:
            self._settle(data[:1])
        text = self._decoder.decode(data)
        text = self._stripped(text) if self._strip and text else text
        self._clean = not (self._strip or self._borrowed or self.holds)
        return text

    def _bytes_of(self, token: int) -> bytes:
        return self._table[token] if token < len(self._table) else b""

    def _stripped(self, text: str) -> str:
        rest = text.lstrip(" ")
        spaces = min(len(text) - len(rest), self._strip)
        self._strip = 0 if rest else self._strip - spaces
        return text[spaces:]

    def flush(self) -> str:
        """See `Detokenizer`."""
        if self._borrowed:
            self._settle(b"")
        return self._decoder.decode(b"", final=True)

    def _settle(self, first: bytes) -> None:
        """Forgets what the prompt has begun, unless this byte goes on with it."""
        text = self._decoder.decode(first, final=not first)
        self._decoder.reset()
        if not text.startswith(_HALF):
            self._decoder.decode(self._borrowed)
        self._borrowed = b""

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
        self._borrowed = 0

    def follow(self, prompt: Items[int], *, shown: bool = False) -> None:
        """See `Detokenizer`."""
        audible = [token for token in prompt if token not in self._silent]
        recent = audible[-_CONTEXT_TOKENS:]
        start, end = self._whole_part(recent)
        self._shown, self._pending = [recent[start:end]] if start < end else [], recent[end:]
        self._borrowed = 0 if shown else len(recent) - end

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

    def _whole_part(self, tokens: list[int]) -> tuple[int, int]:
        """Where whole characters begin and end: some decoders show no byte of a row in which one is missing. All, where
        the text is broken anyway.
        """
        size = len(tokens)
        for start in range(min(_LONGEST_HOLD, size + 1)):
            for end in range(size, max(start, size - _LONGEST_HOLD + 1) - 1, -1):
                text = self._decode(tokens[start:end])
                if not (text.startswith(_HALF) or text.endswith(_HALF)):
                    return start, end
        return 0, size

    def _step(self, token: int) -> str:
        self._pending.append(token)
        if self._decode(self._pending).endswith(_HALF) and len(self._pending) < _LONGEST_HOLD:
            return ""
        return self._show()

    def _show(self) -> str:
        context = [token for group in self._shown for token in group]
        before = len(self._decode(context))
        text = self._decode(context + self._pending)[before:]
        if self._borrowed and text.startswith(_HALF):  # nothing goes on with what the prompt has begun
            self._pending = self._pending[self._borrowed :]
            text = self._decode(context + self._pending)[before:]
        self._borrowed = 0
        self._shown = [*self._shown, self._pending][-_CONTEXT:]
        self._pending = []
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
