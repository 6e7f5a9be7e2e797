"""How long the front end takes to tokenise a prompt, with the built-in model's tokenizer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from blink_proto.tokenizer.files import BUNDLE_FILES
from dpu_service.text.bundle import TextBundle
from dpu_service.text.encoder import TextEncoder

WORDS = "The front end reads a request, checks every field of it, turns its text into tokens and hands them over. "
ROUNDS = 30


def bundle(folder: Path) -> TextBundle:
    """The tokenizer of a model's folder."""
    return TextBundle({name: (folder / name).read_bytes() for name in BUNDLE_FILES if (folder / name).is_file()})


def text_of(loaded: TextBundle, tokens: int) -> str:
    """English of exactly so many tokens."""
    ids = loaded.tokenizer.encode(WORDS * tokens, add_special_tokens=False).ids[:tokens]
    text: str = loaded.tokenizer.decode(ids)
    return text


async def measure(folder: Path, sizes: tuple[int, ...]) -> dict[int, float]:
    """Milliseconds (the median of `ROUNDS`) by number of tokens, as a request waits for them."""
    loaded = bundle(folder)
    encoder = TextEncoder(loaded, 1 << 20)
    found = {}
    for tokens in sizes:
        text, times = text_of(loaded, tokens), []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            ids = await encoder.encode_text(text)
            times.append(time.perf_counter() - begin)
        assert len(ids) == tokens, (len(ids), tokens)
        found[tokens] = 1e3 * sorted(times)[ROUNDS // 2]
    encoder.close()
    return found


def run(folder: Path, sizes: tuple[int, ...]) -> dict[int, float]:
    """`measure` in an event loop of its own."""
    return asyncio.run(measure(folder, sizes))
