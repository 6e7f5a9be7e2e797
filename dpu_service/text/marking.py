"""Marks in texts from outside, so that control tokens in them can be told from those that a template writes.

The mark is a character that none of the texts has. It is put behind the first character of whatever reads like a
control token, and at the end of texts that end in the beginning of one, because a template may write another text right
behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_MARKS = [*range(0xFDD0, 0xFDF0), *range(0xE000, 0xE100)]
"""Characters that no text needs: noncharacters first, then private ones. None of them is over U+FFFF, so that JSON and
Python escape them alike."""


class NoMarkError(Exception):
    """The texts use every character that could be a mark."""


class ControlText:
    """Finds and marks the texts of some control tokens. Those of a single character cannot be told from text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(token for token in tokens if len(token) > 1)
        self.pattern = _pattern(self.tokens, "(?:")
        self._begin = _pattern(self.tokens, "(?=")
        self._beginnings = frozenset(token[:size] for token in self.tokens for size in range(1, len(token)))
        self._sizes = sorted({len(beginning) for beginning in self._beginnings})

    def concerns(self, value: Any) -> bool:
        """Whether anything in it would be marked."""
        return any(self._begin.search(text) or self._is_open(text) for text in texts_in(value))

    def mark(self, value: Any, mark: str) -> Any:
        """The same value with marks in all its texts, the keys of objects included."""
        if isinstance(value, str):
            return self._mark_end(self._mark_tokens(value, mark), mark)
        if isinstance(value, list):
            return [self.mark(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._mark_tokens(key, mark): self.mark(item, mark) for key, item in value.items()}
        return value

    def _mark_tokens(self, text: str, mark: str) -> str:
        return self._begin.sub(rf"\g<0>{mark}", text)

    def _mark_end(self, text: str, mark: str) -> str:
        if not self._is_open(text):
            return text
        end = len(text.rstrip())
        return text[:end] + mark + text[end:]

    def _is_open(self, text: str) -> bool:
        text = text.rstrip()
        return any(text[-size:] in self._beginnings for size in self._sizes if size <= len(text))


def _pattern(tokens: Iterable[str], group: str) -> re.Pattern[str]:
    """Any of the tokens, of several at one place the longest. Grouped by first characters, among which `re` is quick.

    Args:
        group: how the group begins that all but the first character is in.
    """
    rests: dict[str, list[str]] = {}
    for token in sorted(tokens, key=len, reverse=True):
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    grouped = [f"{re.escape(first)}{group}{'|'.join(alternatives)})" for first, alternatives in rests.items()]
    return re.compile("|".join(grouped) or "(?!)")


def texts_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, the keys of objects included."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            open_values += one
        elif isinstance(one, dict):
            open_values += one.keys()
            open_values += one.values()


def unused_marks(value: Any, count: int) -> list[str]:
    """Characters that occur in none of the texts, not even escaped.

    Raises:
        NoMarkError: there are not so many.
    """
    everything = "\0".join(texts_in(value))
    lowered = everything.lower()
    found = []
    for code in _MARKS:
        if chr(code) not in everything and escaped(chr(code)) not in lowered:
            found.append(chr(code))
            if len(found) == count:
                return found
    raise NoMarkError("the messages use every private character")


def escaped(mark: str) -> str:
    """How JSON in ASCII writes it, and Python where a template prints a list or an object."""
    return json.dumps(mark)[1:-1]


def without(text: str, mark: str) -> str:
    """The text without this mark, also where a template has escaped it."""
    return text.replace(mark, "").replace(escaped(mark), "")
