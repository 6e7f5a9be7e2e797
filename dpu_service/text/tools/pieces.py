"""What a parser of tool calls hears in an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

RELEASE_CHARACTERS = 256
"""Arguments are held back until they are complete or have so many characters. So a call that breaks off early is shown
as content and as nothing else, and only long arguments come in several pieces."""
MOST_HELD = 4096
"""Characters of a call before its name is known and its arguments have begun; one that needs more is no call."""


@dataclass(frozen=True)
class CallPiece:
    """News of one call. The first piece of a call has its name, further ones have None.

    Args:
        index: of the call in its answer, from 0.
        arguments: a piece of a JSON object, as the model wrote it.
    """

    index: int
    name: str | None
    arguments: str


@dataclass
class Heard:
    """News of one answer: text that is no call, and calls."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def add(self, later: Heard) -> None:
        """Appends what came later."""
        self.content += later.content
        self.calls += later.calls


class ToolParser(Protocol):
    """Finds the calls in one answer. How the text is cut into pieces makes no difference to what is heard in all."""

    @property
    def over(self) -> bool:
        """Whether nothing that may follow would be heard, so that the answer may end here."""

    @property
    def calls(self) -> int:
        """How many calls there were so far."""

    def feed(self, text: str) -> Heard:
        """What is certain with this text."""

    def finish(self) -> Heard:
        """What was held back, when no more text comes."""
