"""The one call that an answer has been made to begin with, so that the model writes its arguments only."""

from __future__ import annotations

from dpu_service.text.tools.call_object import ArgumentsObject
from dpu_service.text.tools.pieces import CallPiece, Heard


class NamedParser:
    """A parser (see `ToolParser`) for arguments alone. The answer is over once they are complete.

    What the model writes is arguments in any case, because there is a call in any case: without a valid object they are
    as broken as those of a call that `max_tokens` has cut.
    """

    def __init__(self, name: str) -> None:
        self.calls = 0
        self.over = False
        self._name = name
        self._object = ArgumentsObject(name)
        self._begun = False

    def feed(self, text: str) -> Heard:
        """See `ToolParser`."""
        heard = Heard() if self.calls else self.finish()
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        if self.over or not text:
            return heard
        if not self._object.broken:
            taken = self._object.feed(text)
            self.over = self._object.done
            text = text if self._object.broken else text[:taken]
        heard.calls.append(CallPiece(0, None, text))
        return heard

    def finish(self) -> Heard:
        """See `ToolParser`."""
        if self.calls:
            return Heard()
        self.calls = 1
        return Heard(calls=[CallPiece(0, self._name, "")])
