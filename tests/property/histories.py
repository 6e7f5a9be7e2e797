"""Random limits and random actions, drawn by a seeded generator or by Hypothesis alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from tests.property.limits import Limits
from tests.property.world import Action

Draw = Callable[[int, int], int]
"""Draws an integer between both limits, inclusive; 'simpler' is nearer to the lower one."""

POLITE = {"step": 40, "submit": 30, "read": 20, "cancel": 4, "ask": 2, "command": 1}
MIXED = POLITE | {
    "submit_bad": 8,
    "submit_torn": 3,
    "submit_bytes": 3,
    "overrun": 2,
    "plant": 1,
    "cancel_bad": 3,
    "scribble": 3,
    "wrong_read": 2,
    "mute": 2,
    "give_back": 1,
    "wrong_lease": 1,
    "ask": 3,
}
HOSTILE = MIXED | {"noise": 6, "wrong_read": 6, "submit_bytes": 8, "overrun": 6, "wrong_lease": 3, "ask": 6}
SLOW_READER = POLITE | {"read": 6, "cancel": 12, "step": 60, "submit": 40}
MIXES = (POLITE, MIXED, HOSTILE, SLOW_READER)


def draw_limits(draw: Draw) -> Limits:
    """Tiny limits, so that everything runs full and wraps around."""
    max_running = draw(1, 5)
    budget = max_running + draw(0, 12)
    block_tokens = draw(1, draw(1, 8))
    top = budget + draw(0, 3)
    buckets = sorted({draw(1, top) for _ in range(draw(0, 3))} | {top})
    vocab = draw(3, 40)
    return Limits(
        channels=draw(1, 3),
        submit_slots=1 << draw(0, 4),
        cancel_slots=1 << draw(0, 4),
        log_slots=1 << draw(0, 5),
        heap_tokens=draw(1, 48),
        vocab_size=vocab,
        max_model_tokens=draw(2, 40),
        max_sequences=max_running + draw(0, 4),
        max_running=max_running,
        token_budget=budget,
        block_tokens=block_tokens,
        blocks=1 + draw(1, 64 // block_tokens),
        blocks_per_sequence=draw(1, 48 // block_tokens),
        eos_tokens=tuple(draw(0, vocab - 1) for _ in range(draw(0, 2))),
        buckets=tuple(buckets),
        intake_tokens=draw(1, 60),
        prefix_cache=draw(0, 5) < 5,
    )


LONG = Limits(
    channels=4,
    submit_slots=16,
    cancel_slots=16,
    log_slots=64,
    heap_tokens=512,
    vocab_size=500,
    max_model_tokens=120,
    max_sequences=48,
    max_running=24,
    token_budget=64,
    block_tokens=4,
    blocks=200,
    blocks_per_sequence=30,
    eos_tokens=(7, 8),
    buckets=(8, 24, 64),
)
"""For long histories: as many sequences as a small server has, and a pool that they exhaust."""


def draw_action(draw: Draw, mix: dict[str, int], channels: int) -> Action:
    """One action of a mix of weighted kinds."""
    at = draw(0, sum(mix.values()) - 1)
    kind = next(kind for kind, end in zip(mix, accumulate(mix.values()), strict=True) if at < end)
    return Action(kind, draw(0, channels - 1), draw(0, 1 << 20), draw(0, 1 << 10))


def draw_history(draw: Draw, limits: Limits, length: int, mix: dict[str, int]) -> list[Action]:
    """Leases for all channels, then that many actions."""
    leases = [Action("ask", channel) for channel in range(limits.channels)]
    return leases + [draw_action(draw, mix, limits.channels) for _ in range(length)]
