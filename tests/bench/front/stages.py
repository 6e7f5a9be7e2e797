"""Where a token's time goes in the worker: its stages by themselves, in one process, without sockets.

The best of many rounds of 256 plain tokens, so that a busy machine changes little.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from blink_proto import arena
from blink_proto.arena import Finish, RecordKind
from dpu_service.api.answering import Answering
from dpu_service.api.answers import ChatShape, Piece
from dpu_service.api.generation import Plan
from dpu_service.channel.log import TokenLog
from dpu_service.channel.rings import Sampling
from dpu_service.sequences.pump import Wanted
from dpu_service.text.bundle import TextBundle
from tests.bench.front import text

TOKENS = 256
ROUNDS = 300
TOKEN = text.first_tick() + 0x1234


class Memory:
    """A token log of 256 records, as a transport."""

    def __init__(self) -> None:
        records = np.zeros(TOKENS, arena.TokenRecord)
        records["head"] = [arena.pack_token_head(1, RecordKind.TOKEN, Finish.NONE, i) for i in range(TOKENS)]
        records["body"] = arena.pack_token_body(1, 0, TOKEN)
        self._bytes = records.tobytes()

    def read(self, offset: int, size: int) -> bytes:
        """See `Transport`."""
        return self._bytes[offset : offset + size]


def best(work: Callable[[], object]) -> float:
    """µs a token, where `work` does 256."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return 1e6 * min(times) / TOKENS


def decoding() -> Callable[[], object]:
    """Token records to numbers."""
    log = TokenLog(Memory(), 0, 4096, 0)  # type: ignore[arg-type]

    def work() -> None:
        log.unread(log.position)
        assert log.read_plain(TOKENS) is not None

    return work


def wording() -> Callable[[], object]:
    """Numbers to text, each for a choice of its own."""
    bundle = TextBundle(text.files())
    plan = Plan([Wanted([1], [Sampling(1)] * TOKENS)])
    choices: list[Answering] = plan.answerings(bundle)
    decodes = [choice.decode for choice in choices if choice.decode is not None]

    def work() -> None:
        assert [decode([TOKEN]) for decode in decodes] == ["1234"] * TOKENS

    return work


def rendering() -> Callable[[], object]:
    """Text to events."""
    shape = ChatShape("tiny", False, None, lambda found: [], lambda: "")
    shape.chunk(Piece(0, "1234"))
    before, behind = shape.around_text(0)
    return lambda: [b"%b%b%b" % (before, msgspec.json.encode("1234"), behind) for _ in range(TOKENS)]


def encoding(encode: Callable[[Any], object]) -> Callable[[], object]:
    """A whole event by a JSON library."""
    choice = {"index": 0, "delta": {"content": "1234"}, "logprobs": None, "finish_reason": None}
    body = {"id": "chatcmpl-0123456789abcdef01234567", "object": "chat.completion.chunk", "created": 1764500000}
    body |= {"model": "tiny", "choices": [choice]}
    return lambda: [encode(body) for _ in range(TOKENS)]


def measure() -> dict[str, float]:
    """µs a token by stage."""
    found = {
        "decode records": best(decoding()),
        "decode text": best(wording()),
        "render events": best(rendering()),
        "a whole event by msgspec": best(encoding(msgspec.json.encode)),
        "by json": best(encoding(lambda body: json.dumps(body).encode())),
    }
    if importlib.util.find_spec("orjson"):
        import orjson

        found["by orjson"] = best(encoding(orjson.dumps))
    return found
