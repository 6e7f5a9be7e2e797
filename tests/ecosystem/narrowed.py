"""The OpenAPI document with what depends on the model put in, and without what depends on other fields."""

from __future__ import annotations

import copy
from typing import Any

from tests import tiny_text
from tests.front_end import MODEL
from tests.openapi import DOCUMENT

RELATED = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "stream_options", "top_logprobs", "best_of"),
    *("add_special_tokens", "prompt_logprobs", "echo", "bad_words", "tools", "tool_choice"),
    *("continue_final_message", "add_generation_prompt", "chat_template_kwargs"),
)
"""Whether a value is taken depends on other fields, the prompt's length, the tokenizer or the template."""
ONE_OF = {"TokenizeRequest": "messages"}
"""A field that must be left out where another one is given."""


def for_this_model(keys: bool = False) -> dict[str, Any]:
    """Requests are for the served model, and have all the time they want: else every answer would be 404 or 504.

    Args:
        keys: the server wants them.
    """
    made = copy.deepcopy(DOCUMENT)
    if not keys:
        del made["security"]
    for schema in _requests(made).values():
        schema["properties"]["model"] = {"enum": [MODEL] if "model" in schema["required"] else [MODEL, None]}
    for methods in made["paths"].values():
        for operation in methods.values():
            operation["parameters"] = [one for one in operation.get("parameters", []) if one["in"] != "header"]
    return made


def only_served() -> dict[str, Any]:
    """Every request that fits it must be answered with 200."""
    made = for_this_model()
    for name, schema in _requests(made).items():
        for field in (*RELATED, ONE_OF.get(name)):
            schema["properties"].pop(field, None)
        _bound_tokens(schema)
    tokenize = made["components"]["schemas"]["TokenizeRequest"]
    tokenize["required"], tokenize["properties"]["prompt"] = ["prompt"], {"type": "string"}
    made["components"]["schemas"]["ChatRequest"]["properties"]["messages"]["maxItems"] = 4
    message = made["components"]["schemas"]["Message"]
    message["properties"] = {"role": {"enum": ["system", "user"]}, "content": {"type": "string"}}
    message["required"] = ["role", "content"]
    return made


def _requests(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document["components"]["schemas"]
    return {name: schema for name, schema in schemas.items() if name.endswith("Request")}


def _bound_tokens(schema: Any) -> None:
    if isinstance(schema, list):
        for item in schema:
            _bound_tokens(item)
    elif isinstance(schema, dict):
        if schema == {"type": "integer", "minimum": 0}:
            schema["maximum"] = tiny_text.vocab_size() - 1
        if "propertyNames" in schema:
            schema["propertyNames"] = {"pattern": "^[0-9]{1,2}$"}
        for item in schema.values():
            _bound_tokens(item)
