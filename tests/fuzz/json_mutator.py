"""Changes JSON bodies as a client might get them wrong: other values, other types, fields more and fewer."""

from __future__ import annotations

import json
import random
from typing import Any

from dpu_service.api.requests import ChatRequest, CompletionRequest

FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 16, 129, 1 << 31, 1 << 63, 1 << 64, 1e300, -1e300, 1e-300, 0.5, 1.0, -0.0),
    *(
        "",
        "a",
        "tiny",
        "text",
        "user",
        "assistant",
        "tool",
        "auto",
        "none",
        "required",
        "\0",
        "é😀",
        "\u2028",
        "NaN",
        "<s>",
    ),
    *([], {}, [[]], [1], [0, 399], ["a", "b"], {"1": 1}, {"a": 1}, {"type": "text"}, [{"type": "text", "text": "x"}]),
    *({"include_usage": True}, [{"role": "user", "content": "hi"}], {"role": "system", "content": None}),
    *([{"role": "assistant", "tool_calls": [{}]}], {"type": "function", "function": {"name": "f"}}, ["the end"]),
]
RAW = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1.0", b"\xff", b"\\ud800", b"[" * 300, b'"model":"tiny",', b"00"]


def mutated(body: bytes, seed: int) -> bytes:
    """Another body, the same for the same seed."""
    chance = random.Random(seed)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = {"model": "tiny", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(chance.randint(1, 4)):
        value = _change(value, chance)
    changed = json.dumps(value).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(changed) + 1)
        changed = changed[:at] + chance.choice(RAW) + changed[at + chance.randrange(4) :]
    return changed


def _change(value: Any, chance: random.Random) -> Any:
    """Somewhere in it, once."""
    if isinstance(value, dict):
        return _change_object(value, chance)
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], _change(value[at], chance), *value[at + 1 :]]
    if isinstance(value, list) and chance.random() < 0.3:
        return value * chance.choice([2, 20])
    if isinstance(value, str) and chance.random() < 0.4:
        return value * chance.choice([2, 5, 40]) + chance.choice(["", " ", "\n", "😀", "<|im_end|>"])
    return chance.choice(VALUES)


def _change_object(value: dict[str, Any], chance: random.Random) -> Any:
    kind = chance.random()
    if kind < 0.05:
        return chance.choice(VALUES)
    if kind < 0.15 and value:
        gone = chance.choice(list(value))
        return {name: item for name, item in value.items() if name != gone}
    name = chance.choice(list(value)) if value and kind < 0.6 else chance.choice(FIELDS)
    return {**value, name: _change(value.get(name), chance)}
