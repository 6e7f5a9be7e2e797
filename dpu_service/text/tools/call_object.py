"""The objects that a call consists of, read from text that comes in pieces."""

from __future__ import annotations

import json
import re

from dpu_service.text.tools.json_walk import PLAIN, JsonWalk

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)
"""Names of functions."""
_ARGUMENTS = ("arguments", "parameters")


class ArgumentsObject:
    """The arguments of a call alone: one object.

    Attributes:
        name: of the function, once known.
        complete: the arguments are.
        done: the object is complete.
        broken: the text goes on with what cannot stand in it.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.complete = self.done = self.broken = False
        self.waiting = 0
        self._walk = JsonWalk()
        self._pieces: list[str] = []

    def feed(self, text: str) -> int:
        """Takes text; how many characters belong to the object."""
        walk, at = self._walk, 0
        while at < len(text) and not self.done:
            plain = PLAIN.match(text, at) if walk.takes_plain else None
            if plain and plain.end() > at:
                self._note(plain.group())
                at = plain.end()
            elif self._step(text[at]):
                at += 1
                self.done = walk.done
            else:
                self.broken = True
                break
        return at

    def take(self) -> str:
        """Arguments since the last call; `waiting` is their number of characters."""
        taken = "".join(self._pieces)
        self._pieces.clear()
        self.waiting = 0
        return taken

    def _step(self, character: str) -> bool:
        if not self._walk.step(character):
            return False
        self._note(character)
        self.complete = self._walk.done
        return True

    def _note(self, text: str) -> None:
        self._pieces.append(text)
        self.waiting += len(text)


class CallObject(ArgumentsObject):
    """A call as an object with `name` and `arguments` (or `parameters`, as some models write), in any order.

    Without arguments they are `{}`. Other keys are passed over.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._key = self._string = ""
        self._inside = False

    def _step(self, character: str) -> bool:
        walk = self._walk
        in_string, starts = walk.in_string, walk.depth == 1 and walk.expects_value and not character.isspace()
        if not walk.step(character) or (starts and not self._may_start(character)):
            return False
        if in_string or walk.in_string or self._inside:
            self._note(character)
        if self._inside and walk.depth == 1:
            self._inside, self.complete = False, True
        if in_string and not walk.in_string and walk.depth == 1:
            return self._take_string()
        if walk.done and not self.complete:
            self.complete = True
            super()._note("{}")
        return True

    def _may_start(self, character: str) -> bool:
        """Whether the value of the present key may begin so."""
        if self._key in _ARGUMENTS:
            self._inside = character == "{" and not self.complete
            return self._inside
        return self._key != "name" or (character == '"' and self.name is None)

    def _take_string(self) -> bool:
        text, self._string = json.loads(self._string), ""
        if self._walk.in_key:
            self._key = text
        elif self._key == "name":
            self.name = text
            return NAME.fullmatch(text) is not None
        return True

    def _note(self, text: str) -> None:
        if self._inside:
            super()._note(text)
        elif self._walk.depth == 1:
            self._string += text
