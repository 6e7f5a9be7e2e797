"""Which of several functions an answer calls where it must call one: `tool_choice` of `required`.

Prompts that go on with each function's call differ in some token. The first such token is sampled among those that the
prompts have there, and so on until one prompt is left: a request for one token for each fork, mostly one in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import replace

from blink_proto.arena import Finish
from dpu_service.api.generation import Plan
from dpu_service.channel.rings import Sampling
from dpu_service.sequences.errors import SequenceLostError
from dpu_service.sequences.inbox import Inbox
from dpu_service.sequences.pump import Pump, Wanted


async def decide(pump: Pump, plans: list[Plan], inbox: Inbox) -> Plan:
    """One of the plans, as the model wants it under the request's own sampling.

    Args:
        plans: each with one prompt and one choice; no prompt is the beginning of another one.
        inbox: of this alone; whoever fails it ends the deciding.

    Raises:
        SequencesError: the device takes no sequence now, or the request is over.
    """
    while len(plans) > 1:
        prompts = [plan.wanted[0].prompt for plan in plans]
        place = fork(prompts)
        options = sorted({prompt[place] for prompt in prompts})
        token = await _sample(pump, _question(plans[0].wanted[0], place, options), inbox)
        plans = [plan for plan, prompt in zip(plans, prompts, strict=True) if prompt[place] == token]
    return plans[0]


def fork(prompts: Items[Items[int]]) -> int:
    """Where they first differ: tokens that all begin with. No prompt is the beginning of another one."""
    first, last = min(map(list, prompts)), max(map(list, prompts))  # what these two have in common all have
    return next(place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)


def _question(wanted: Wanted, place: int, options: list[int]) -> Wanted:
    """Asks for the next token, which is one of these. A bias that would forbid one does not count: what forces a call
    does not ask whether its name's tokens are liked."""
    bias = {token: value for token, value in wanted.bias if math.isfinite(value)}
    return Wanted(
        wanted.prompt[:place], [_one_token(wanted.samplings[0])], [(one, bias.get(one, 0.0)) for one in options]
    )


def _one_token(sampling: Sampling) -> Sampling:
    plain = replace(sampling, stop_tokens=(), ignore_eos=True, logprobs=0, prompt_logprobs=False)
    return replace(plain, max_tokens=1, min_tokens=0, allow_only=True)


async def _sample(pump: Pump, question: Wanted, inbox: Inbox) -> int:
    running = pump.request([question], inbox)
    tokens: list[int] = []
    finish = Finish.NONE
    try:
        while finish is Finish.NONE:
            for _, item in await inbox.take():
                tokens += item.tokens
                finish = item.finish
    finally:
        pump.abandon(running)
    if len(tokens) != 1 or all(tokens[0] != token for token, _ in question.bias):
        raise SequenceLostError("the device answered with a token that was not asked for")
    return tokens[0]
