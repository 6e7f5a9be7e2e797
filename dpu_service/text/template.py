"""Chat templates: Jinja2 in a sandbox, with the helpers that published templates expect."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dpu_service.text.bundle import TextBundle


class ChatTemplateError(Exception):
    """The template refuses the messages, or cannot render them; the message is fit for clients."""


class NoChatTemplateError(ChatTemplateError):
    """The model has no chat template."""


class ChatTemplate:
    """A model's chat template.

    Raises:
        ChatTemplateError: its source does not compile.
    """

    def __init__(self, bundle: TextBundle) -> None:
        self._constants = {"bos_token": bundle.bos_token, "eos_token": bundle.eos_token}
        extensions: list[str | type[Extension]] = [loopcontrols]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(bundle.chat_template) if bundle.chat_template else None
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt's text, ready for the assistant's answer.

        Raises:
            ChatTemplateError: see there.
        """
        if self._template is None:
            raise NoChatTemplateError("this model has no chat template; use /v1/completions")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._constants)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error.message}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise ChatTemplateError("the chat template cannot render these messages") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
