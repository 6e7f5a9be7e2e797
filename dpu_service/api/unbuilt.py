"""Fields that clients know from other servers and that are not built: refused when they would change the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpu_service.api.errors import unsupported
from dpu_service.api.requests import CommonRequest


def _number(value: Any) -> Callable[[Any], bool]:
    return lambda given: not isinstance(given, bool) and isinstance(given, int | float) and given == value


def _off(given: Any) -> bool:
    return given is False


def _empty(given: Any) -> bool:
    return given in ({}, [], "")


def _one(given: Any) -> bool:
    return given is True or given == 1


_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "prompt_logprobs": _off,
    "return_tokens_as_token_ids": _off,
    "echo": _off,
    "best_of": _number(1),
    "suffix": _empty,
    "prompt_embeds": _empty,
    "length_penalty": _number(1),
    "bad_words": _empty,
    "truncate_prompt_tokens": lambda _: False,
    "include_stop_str_in_output": _off,
    "response_format": lambda given: given == {"type": "text"},
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "structured_outputs": _empty,
    "use_beam_search": _off,
    "tools": _empty,
    "tool_choice": lambda given: given in ("none", "auto"),
    "functions": _empty,
    "function_call": lambda given: given in ("none", "auto"),
    "modalities": lambda given: given == ["text"],
    "audio": _empty,
    "prediction": _empty,
    "web_search_options": _empty,
    "chat_template": _empty,
    "chat_template_kwargs": _empty,
    "documents": _empty,
    "add_generation_prompt": _one,
    "continue_final_message": _off,
}
"""Values (beside null and absence) that mean the same as leaving the field out."""


def refuse_unbuilt(request: CommonRequest) -> None:
    """Checks every such field of a request.

    Raises:
        ApiError: 400 `unsupported_parameter`, naming the first one.
    """
    for name, harmless in _HARMLESS.items():
        given = getattr(request, name, None)
        if given is not None and not harmless(given):
            raise unsupported(name)
