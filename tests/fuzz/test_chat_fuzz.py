"""Chat requests with tools, got wrong in random places, for models of several templates: nothing but ApiError may come
out, and what is taken is as the OpenAPI document says."""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from dpu_service.api.errors import ApiError
from dpu_service.api.prepare import prepare_chat
from dpu_service.config import ModelInfo
from dpu_service.runtimes import Serving
from dpu_service.sequences.pump import Pump
from dpu_service.text.bundle import TextBundle
from dpu_service.text.encoder import TextEncoder
from tests import chat_templates
from tests.fuzz import request_target
from tests.openapi import judge_request

WINDOW = 4096
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": "<s>"}]}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}
RIGHT: dict[str, Any] = {
    "model": request_target.MODEL,
    "messages": [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}], "name": "n"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "123456789", "content": "ok"},
        {"role": "assistant", "content": "The"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"enable_thinking": False, "date_string": "x"},
    "continue_final_message": False,
    "add_generation_prompt": True,
    "echo": False,
}
VALUES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1e9,
        2**70,
        "",
        "x",
        "<|im_end|>",
        "\ufdd0",
        "{}",
        "[]",
        "</think>",
        '{"a": 1}',
        "😀" * 9,
    ),
    *(
        "required",
        "none",
        "tool",
        "user",
        "assistant",
        "system",
        "developer",
        "f",
        [],
        {},
        [[]],
        [{}],
        {"a": {"a": {}}},
    ),
    {"type": "function", "function": {"name": "f"}},
]
KEYS = ["role", "content", "name", "type", "function", "arguments", "other"]


@cache
def serving(template: str) -> Serving:
    info = ModelInfo(request_target.MODEL, architecture="none", parameters=1, loaded_unix_seconds=1, dtype="none")
    geometry = msgspec.structs.replace(
        request_target.geometry(),
        vocab_size=chat_templates.tokenizer().get_vocab_size(),
        max_model_tokens=WINDOW,
        max_sequence_tokens=WINDOW,
        heap_tokens=4 * WINDOW,
    )
    encoder = TextEncoder(TextBundle(chat_templates.files(template)), WINDOW)
    return Serving(info, geometry, encoder, cast(Pump, SimpleNamespace(queue_depth=16)))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every list and object with each of its indices or keys, but for the model's name."""
    found = []
    inside = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, inner in inside:
        if key != "model":
            found.append((value, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


def get_wrong(value: Any, chance: random.Random) -> None:
    holder, key = chance.choice(places(value))
    how = chance.random()
    if how < 0.5:
        holder[key] = copied(chance.choice(VALUES))
    elif how < 0.65:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(chance.randint(0, len(holder)), copied(chance.choice(holder)))
    else:
        holder[chance.choice(KEYS)] = copied(chance.choice(VALUES))


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("template", ["hermes", "llama", "mistral", "qwen_xml", "parts_only"])
def test_chat_requests_that_are_nearly_right(template: str) -> None:
    chance, taken = random.Random(template), 0
    with asyncio.Runner() as runner:
        for _ in range(250):
            body = copied(RIGHT)
            for _ in range(chance.randint(0, 3)):
                get_wrong(body, chance)
            try:
                runner.run(prepare_chat(request_target.served(serving(template)), json.dumps(body).encode()))
            except ApiError as error:
                request_target.fit_for_client(error)
            else:
                taken += 1
                judge_request("ChatRequest", body)
    assert taken > 10 or template == "parts_only", "which has no place for tools"
