"""A conversation as the rest of `text` takes it: checked, but not yet rendered."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dpu_service.text.marking import texts_in
from dpu_service.text.template import Message

MESSAGE_CHARACTERS = 64
"""What rendering a message costs, in characters tokenised."""


@dataclass(frozen=True)
class Conversation:
    """What a chat template gets.

    Args:
        messages: their content is a string or a list of parts of type `text`.
        tools: functions that the model may call; None where the template is to hear of none.
        variables: of `chat_template_kwargs`.
        continue_final: the last message, of the assistant, is left open for the model to go on with.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False

    @property
    def outside(self) -> list[Any]:
        """All that came from outside."""
        return [self.messages, self.tools, self.variables]

    def measure(self) -> None:
        """Finds out its sizes now, which takes long where there are many texts."""
        _ = self.message_characters, self.cost

    @cached_property
    def message_characters(self) -> int:
        """Characters of all contents, which the prompt has at least."""
        return sum(len(text) for message in self.messages for text in texts_in(message["content"]))

    @cached_property
    def cost(self) -> int:
        """Of rendering and tokenising it, in characters tokenised."""
        return sum(map(len, texts_in(self.outside))) + MESSAGE_CHARACTERS * len(self.messages)
