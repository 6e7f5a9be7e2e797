"""A tokenizer with a token for each tick of the paced device: the text of tick t is t in four hexadecimal digits."""

from __future__ import annotations

import json
from functools import cache

from tests import tiny_text

TICKS = 1 << 16
DIGITS = 4


@cache
def files() -> dict[str, bytes]:
    """The tiny tokenizer's files with the tick tokens behind its own."""
    files = dict(tiny_text.files())
    content = json.loads(files["tokenizer.json"])
    content["model"]["vocab"] |= {f"{tick:04x}": first_tick() + tick for tick in range(TICKS)}
    files["tokenizer.json"] = json.dumps(content).encode()
    return files


def first_tick() -> int:
    """Token id of tick 0."""
    return tiny_text.vocab_size()


def vocab_size() -> int:
    """Ids are below this."""
    return first_tick() + TICKS
