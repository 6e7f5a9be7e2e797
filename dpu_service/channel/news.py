"""What the device says of a sequence."""

from __future__ import annotations

import msgspec

from blink_proto import arena
from dpu_service.channel.logprobs import Logprob


class News(msgspec.Struct):
    """What one poll brought for one sequence.

    `finish` is NONE while it goes on. `fault` says what the device wrote that cannot be. `logprobs` has an item for
    each of the tokens, the token's own, then the most likely ones', and nothing for a sequence that wants none.
    `prompt_logprobs` has the same for tokens of the prompt: for all but the first one, in order, before any token.
    `cached`, with a first token: those of the prompt that were in the device's prefix cache.
    """

    position: int
    tokens: list[int]
    finish: arena.Finish = arena.Finish.NONE
    kind: arena.RecordKind = arena.RecordKind.TOKEN
    detail: int = 0
    fault: str = ""
    logprobs: list[list[Logprob]] = []
    prompt_logprobs: list[list[Logprob]] = []
    cached: int = 0
