"""JSON (RFC 8259) a character at a time: whether what has come so far can still become a value."""

from __future__ import annotations

import re
from collections.abc import Callable

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Characters that leave a string open."""
MOST_DEPTH = 64
_MOST_NUMBER = 128
_NUMBER_BEGIN = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?)?", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_SPACE = " \t\n\r"


class JsonWalk:
    """Follows one object, strictly.

    Attributes:
        done: the object is complete.
        in_string: the last character left a string open.
        in_key: this string, or the one that was closed last, is a key.
    """

    def __init__(self) -> None:
        self.done = self.in_string = self.in_key = False
        self._closers: list[str] = []
        self._rest = ""
        self._state: Callable[[str], bool] = self._begin

    @property
    def depth(self) -> int:
        """Objects and arrays that are open."""
        return len(self._closers)

    @property
    def takes_plain(self) -> bool:
        """Whether `PLAIN` characters change nothing."""
        return self._state == self._string

    @property
    def expects_value(self) -> bool:
        """Whether a value comes next, if no space."""
        return self._state == self._value

    def step(self, character: str) -> bool:
        """Takes a character; False where it cannot stand here."""
        return self._state(character)

    def _begin(self, character: str) -> bool:
        return character == "{" and self._value(character)

    def _value(self, character: str) -> bool:
        if character in _SPACE:
            return True
        if character == '"':
            return self._open_string(key=False)
        if character in "{[":
            self._closers.append("}" if character == "{" else "]")
            self._state = self._first_key if character == "{" else self._first_item
            return self.depth <= MOST_DEPTH
        if character in _LITERALS:
            self._rest, self._state = _LITERALS[character], self._literal
            return True
        self._rest, self._state = "", self._number
        return self._number(character)

    def _first_item(self, character: str) -> bool:
        if character in _SPACE:
            return True
        return self._close() if character == "]" else self._value(character)

    def _first_key(self, character: str) -> bool:
        return self._close() if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        return character in _SPACE or (character == '"' and self._open_string(key=True))

    def _open_string(self, key: bool) -> bool:
        self.in_string, self.in_key, self._state = True, key, self._string
        return True

    def _string(self, character: str) -> bool:
        if character == '"':
            self.in_string = False
            self._state = self._colon if self.in_key else self._behind
        elif character == "\\":
            self._state = self._escape
        return character >= " "

    def _escape(self, character: str) -> bool:
        self._rest, self._state = "", self._code if character == "u" else self._string
        return character in '"\\/bfnrtu'

    def _code(self, character: str) -> bool:
        self._rest += character
        if len(self._rest) == 4:
            self._state = self._string
        return character in "0123456789abcdefABCDEF"

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._state = self._value
        return character == ":" or character in _SPACE

    def _literal(self, character: str) -> bool:
        wanted, self._rest = self._rest[0], self._rest[1:]
        if not self._rest:
            self._state = self._behind
        return character == wanted

    def _number(self, character: str) -> bool:
        number = self._rest + character
        if _NUMBER_BEGIN.fullmatch(number) and len(number) <= _MOST_NUMBER:
            self._rest = number
            return True
        if not _NUMBER.fullmatch(self._rest):
            return False
        self._state = self._behind
        return self._behind(character)

    def _behind(self, character: str) -> bool:
        """Behind a value within an object or an array."""
        if character == ",":
            self._state = self._key if self._closers[-1] == "}" else self._value
            return True
        return character in _SPACE or (character == self._closers[-1] and self._close())

    def _close(self) -> bool:
        self._closers.pop()
        self.done = not self._closers
        self._state = self._behind
        return True
