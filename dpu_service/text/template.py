"""Chat templates: from messages and tools to the text of a prompt."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from blink_proto.tokenizer.sandbox import BrokenTemplateError, TemplateSandbox

Message = dict[str, Any]
"""As templates see it: `role` and `content`, perhaps `name`, `tool_calls`, `tool_call_id`, `reasoning_content`."""

MOST_CHARACTERS = 1 << 24
_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, RuntimeError)


class ChatTemplateError(Exception):
    """The template refuses the messages, or cannot render them; the message is fit for clients."""


class NoChatTemplateError(ChatTemplateError):
    """The model has no chat template."""


class RenderedTooLongError(ChatTemplateError):
    """The text grew over its limit."""


class ChatTemplate:
    """One chat template.

    Args:
        source: of Jinja2.
        constants: names that it may use, `bos_token` for example.

    Raises:
        ChatTemplateError: the source does not compile.
    """

    def __init__(self, source: str, constants: dict[str, str]) -> None:
        self.source = source
        self.constants = constants
        self._sandbox = TemplateSandbox()
        try:
            self._template, self.variables = self._sandbox.compiled(source)
        except BrokenTemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error

    @property
    def takes_tools(self) -> bool:
        """Whether it has a place for the tools of a request."""
        return "tools" in self.variables

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
        most_characters: int = MOST_CHARACTERS,
    ) -> str:
        """The prompt's text.

        Args:
            add_generation_prompt: it ends with the beginning of the assistant's answer.
            variables: further names for the template.

        Raises:
            ChatTemplateError: see there.
        """
        given = {
            **self.constants,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self._sandbox.bounded():
                return _joined(self._template.generate(given), most_characters)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error.message}") from error
        except _FAILURES as error:
            raise ChatTemplateError("the chat template cannot render these messages") from error


def _joined(pieces: Any, most: int) -> str:
    taken, characters = [], 0
    for piece in pieces:
        taken.append(piece)
        characters += len(piece)
        if characters > most:
            raise RenderedTooLongError(f"the rendered conversation has over {most} characters")
    return "".join(taken)
