"""The OpenAPI document with what depends on the model put in, and without what depends on other fields."""

from __future__ import annotations

import copy
from typing import Any

from tests import tiny_text
from tests.front_end import MODEL
from tests.openapi import DOCUMENT

REQUESTS = ("CompletionRequest", "ChatRequest")
RELATED = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "stream_options", "top_logprobs"),
    *("best_of", "bad_words", "add_special_tokens", "prompt_logprobs", "echo"),
    *("tools", "tool_choice", "continue_final_message", "add_generation_prompt", "chat_template_kwargs"),
)
"""Whether a value is taken depends on other fields, the prompt's length or the tokenizer."""


def for_this_model() -> dict[str, Any]:
    """Requests are for the served model: else every answer would be 404."""
    made = copy.deepcopy(DOCUMENT)
    del made["security"]
    for name in REQUESTS:
        made["components"]["schemas"][name]["properties"]["model"] = {"const": MODEL}
    return made


def only_served() -> dict[str, Any]:
    """Every request that fits it must be answered with 200."""
    made = for_this_model()
    schemas = made["components"]["schemas"]
    for name in REQUESTS:
        for field in RELATED:
            schemas[name]["properties"].pop(field, None)
        _bound_tokens(schemas[name])
    message = schemas["Message"]
    message["properties"] = {"role": {"enum": ["system", "user"]}, "content": {"type": "string"}}
    message["required"] = ["role", "content"]
    return made


def _bound_tokens(schema: Any) -> None:
    if isinstance(schema, list):
        for item in schema:
            _bound_tokens(item)
    elif isinstance(schema, dict):
        if schema == {"type": "integer", "minimum": 0}:
            schema["maximum"] = tiny_text.vocab_size() - 1
        for item in schema.values():
            _bound_tokens(item)
