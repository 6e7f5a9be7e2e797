"""Fields that clients know from other servers and that are not built: refused when they would change the answer."""

from __future__ import annotations

from functools import cache
from typing import Any, get_type_hints

import msgspec

from dpu_service.api import fields
from dpu_service.api.errors import unsupported
from dpu_service.api.requests import CommonRequest

HARMLESS: dict[str, list[Any]] = {
    "suffix": [{}, [], ""],
    "prompt_embeds": [{}, [], ""],
    "length_penalty": [1],
    "response_format": [{"type": "text"}],
    "guided_json": [{}, [], ""],
    "guided_regex": [{}, [], ""],
    "guided_choice": [{}, [], ""],
    "guided_grammar": [{}, [], ""],
    "structured_outputs": [{}, [], ""],
    "use_beam_search": [False],
    "early_stopping": [False],
    "continuous_usage_stats": [False],
    "logits_processors": [{}, [], ""],
    "return_token_ids": [False],
    "typical_p": [1],
    "stop_regex": [{}, [], ""],
    "regex": [""],
    "ebnf": [""],
    "json_schema": [{}, [], ""],
    "grammar": [{}, [], ""],
    "functions": [{}, [], ""],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "audio": [{}, [], ""],
    "prediction": [{}, [], ""],
    "web_search_options": [{}, [], ""],
    "chat_template": [{}, [], ""],
    "documents": [{}, [], ""],
}
"""Values (beside null and absence) that mean the same as leaving the field out; the document lists them too."""


def refuse_unbuilt(request: msgspec.Struct) -> None:
    """Checks every such field of a request.

    Raises:
        ApiError: 400 `unsupported_parameter`, naming the first one.
    """
    _refuse(request, "")
    if isinstance(request, CommonRequest) and request.stream_options is not None:
        _refuse(request.stream_options, "stream_options.")


def _refuse(given: msgspec.Struct, at: str) -> None:
    for name in unbuilt_fields(type(given)):
        value = getattr(given, name)
        if value is not None and not any(_same(value, harmless) for harmless in HARMLESS[name]):
            raise unsupported(at + name)


@cache
def unbuilt_fields(kind: type[msgspec.Struct]) -> list[str]:
    """Names of the fields of a body that are not built."""
    hints = get_type_hints(kind, include_extras=True)
    return [name for name, hint in hints.items() if hint == fields.Unbuilt]


def _same(given: Any, value: Any) -> bool:
    """Equal as JSON: true is no number."""
    return bool(given == value) and isinstance(given, bool) == isinstance(value, bool)
