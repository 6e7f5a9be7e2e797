"""Fields that clients know from other servers and that are not built: refused when they would change the answer."""

from __future__ import annotations

from typing import Any

from dpu_service.api.errors import unsupported
from dpu_service.api.requests import CommonRequest

HARMLESS: dict[str, list[Any]] = {
    "prompt_logprobs": [False],
    "return_tokens_as_token_ids": [False],
    "echo": [False],
    "best_of": [1],
    "suffix": [{}, [], ""],
    "prompt_embeds": [{}, [], ""],
    "length_penalty": [1],
    "bad_words": [{}, [], ""],
    "truncate_prompt_tokens": [],
    "include_stop_str_in_output": [False],
    "response_format": [{"type": "text"}],
    "guided_json": [{}, [], ""],
    "guided_regex": [{}, [], ""],
    "guided_choice": [{}, [], ""],
    "guided_grammar": [{}, [], ""],
    "structured_outputs": [{}, [], ""],
    "use_beam_search": [False],
    "tools": [{}, [], ""],
    "tool_choice": ["none", "auto"],
    "functions": [{}, [], ""],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "audio": [{}, [], ""],
    "prediction": [{}, [], ""],
    "web_search_options": [{}, [], ""],
    "chat_template": [{}, [], ""],
    "chat_template_kwargs": [{}, [], ""],
    "documents": [{}, [], ""],
    "add_generation_prompt": [True, 1],
    "continue_final_message": [False],
}
"""Values (beside null and absence) that mean the same as leaving the field out; the document lists them too."""


def refuse_unbuilt(request: CommonRequest) -> None:
    """Checks every such field of a request.

    Raises:
        ApiError: 400 `unsupported_parameter`, naming the first one.
    """
    for name, harmless in HARMLESS.items():
        given = getattr(request, name, None)
        if given is not None and not any(_same(given, value) for value in harmless):
            raise unsupported(name)


def _same(given: Any, value: Any) -> bool:
    """Equal as JSON: true is no number."""
    return bool(given == value) and isinstance(given, bool) == isinstance(value, bool)
