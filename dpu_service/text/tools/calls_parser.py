"""What the formats with calls as JSON objects have in common."""

from __future__ import annotations

from collections.abc import Callable

from dpu_service.text.tools.call_object import ArgumentsObject, CallObject
from dpu_service.text.tools.pieces import MOST_HELD, RELEASE_CHARACTERS, CallPiece, Heard


class CallsParser:
    """A parser (see `ToolParser`) for calls behind a marker.

    Text that cannot be a call is content. Once a call is certain, which is when its name and its arguments are known or
    many of them have come, it is told, and a flaw behind that makes the rest content.

    White space at the beginning of an answer and next to calls goes with the calls.

    Args:
        marker: calls begin behind it.
        closers: what may end a call, or a list of them.
        separator: between the calls of a list.
        parallel: more than one call is wanted.
    """

    marker: str
    closers: tuple[str, ...] = ()
    separator = ""

    def __init__(self, parallel: bool = True) -> None:
        self.calls = 0
        self.over = False
        self._parallel = parallel
        self._stage: Callable[[], bool] = self._text
        self._buffer = ""
        self._held = ""
        self._space = ""
        self._quiet = True
        self._told = False
        self._object: ArgumentsObject = CallObject()
        self._heard = Heard()

    def feed(self, text: str) -> Heard:
        """See `ToolParser`."""
        self._buffer += text
        while self._buffer and not self.over and self._stage():
            pass
        heard, self._heard = self._heard, Heard()
        return heard

    def finish(self) -> Heard:
        """See `ToolParser`."""
        if not self.over and not self._told and self._stage != self._behind:
            self._say(self._held + self._buffer)
        if not self.calls:
            self._heard.content += self._space
        heard, self._heard = self._heard, Heard()
        return heard

    def _text(self) -> bool:
        """Outside of calls. Like all stages it takes from the buffer; False where it needs more."""
        before, found, rest = self._buffer.partition(self.marker)
        if not found:
            held = open_end(self._buffer, self.marker)
            before, rest = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        self._say(before)
        self._buffer = rest
        if found:
            self._held, self._stage = self.marker, self._open
        return bool(found)

    def _open(self) -> bool:
        """Behind a marker or a separator."""
        if not self._hold_space():
            return False
        if self._buffer[0] == "{":
            self._begin(CallObject())
        else:
            self._fail()
        return True

    def _begin(self, reader: ArgumentsObject) -> None:
        self._object, self._told, self._stage = reader, False, self._within

    def _within(self) -> bool:
        """Within the object of a call."""
        reader = self._object
        room = len(self._buffer) if self._told else MOST_HELD - len(self._held)
        taken = reader.feed(self._buffer[:room])
        if not self._told:
            self._held += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        if self._told or self._is_certain(reader):
            self._tell(reader)
        if reader.done or reader.broken or (not self._told and len(self._held) >= MOST_HELD):
            self._leave(reader)
        return True

    def _is_certain(self, reader: ArgumentsObject) -> bool:
        return self._is_function(reader.name) and (reader.complete or reader.waiting >= RELEASE_CHARACTERS)

    def _is_function(self, name: str | None) -> bool:
        return name is not None

    def _tell(self, reader: ArgumentsObject) -> None:
        if not self._told:
            self._told, self._quiet, self._held, self._space = True, True, "", ""
            self._heard.calls.append(CallPiece(self.calls, reader.name, ""))
            self.calls += 1
        if arguments := reader.take():
            self._heard.calls.append(CallPiece(self.calls - 1, None, arguments))
        self.over = reader.complete and not self._parallel

    def _leave(self, reader: ArgumentsObject) -> None:
        """A call that lacks its last brace is complete all the same."""
        if not self._told:
            self._fail()
        else:
            self._told, self._stage = False, self._behind if reader.complete else self._text

    def _behind(self) -> bool:
        """Behind a call."""
        rest = self._buffer.lstrip()
        self._space += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        ends = [*self.closers, *([self.separator] if self.separator else [])]
        for end in ends:
            if rest.startswith(end):
                self._buffer, self._space = rest[len(end) :], ""
                self._held, self._stage = (end, self._open) if end == self.separator else ("", self._text)
                return True
        if any(end.startswith(rest) for end in ends):
            return False
        self._stage = self._text
        return True

    def _fail(self) -> None:
        """What was held is no call."""
        held, self._held = self._held, ""
        self._say(held)
        self._stage = self._text

    def _hold_space(self) -> bool:
        """Moves white space to what is held; whether anything is left."""
        rest = self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(rest)][: MOST_HELD - len(self._held)]
        self._held += space
        self._buffer = self._buffer[len(space) :]
        return bool(self._buffer)

    def _say(self, text: str) -> None:
        if self._quiet:
            self._space += text
            if not text.strip():
                return
            text, self._space, self._quiet = self._space, "", False
        self._heard.content += text


def open_end(text: str, marker: str) -> int:
    """Length of the longest end of the text that is a beginning of the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
