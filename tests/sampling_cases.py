"""Rows of logits and ways to sample them, for tests of every build of the sampling kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.kernels.sampling import Slots
from gpu_runtime.scheduler import layout


@dataclass
class Cases:
    """One row of logits for each row to sample; row r belongs to slot r. `banned`: the sequences in its bans."""

    logits: torch.Tensor
    rows: NDArray[np.void]
    slots: Slots
    banned: list[list[list[int]]]
    logprobs: NDArray[np.void] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs = np.zeros(len(self.rows), layout.RowLogprobs)


PLAIN: dict[str, Any] = {"top_p": 1.0}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.3},
    {"temperature": 100},
    {"temperature": 1, "top_k": 1},
    {"temperature": 1, "top_k": 7},
    {"temperature": 2, "top_k": 1000},
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 3, "top_p": 0.95},
    {"temperature": 100, "top_p": 0.5},
    {"temperature": 1, "top_p": 1e-6},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.99, "min_p": 0.02},
    {"temperature": 1, "repetition_penalty": 1.3},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 0.7},
    {"temperature": 1, "frequency_penalty": -0.25, "top_p": 0.95},
    {"temperature": 1, "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 0.1},
    {"temperature": 1, "bias": 30},
    {"temperature": 1, "bias": 1024},
    {"temperature": 1, "bias": 12, "allow_only": 1},
    {"temperature": 0.7, "bias": 12, "allow_only": 1, "repetition_penalty": 2, "top_p": 0.8},
    {"temperature": 0, "masked": True},
    {"temperature": 1, "logprobs": 1},
    {"temperature": 0, "logprobs": 21},
    {"temperature": 1, "logprobs": 6, "bias": 30, "presence_penalty": 2, "masked": True},
    {"temperature": 0, "bans": 3},
    {"temperature": 1, "bans": 1000},
    {"temperature": 1, "bans": 2, "bias": 12, "allow_only": 1},
    {"temperature": 0.7, "bans": 40, "masked": True, "frequency_penalty": 0.3, "logprobs": 3},
    {"known": True, "logprobs": 1},
    {"known": True, "logprobs": 6, "temperature": 1, "top_p": 0.5},
]
"""Fields of SampleRow and SampleExtras; `bias`: number of entries; `bans`: of sequences; `masked`: with MASK_STOPS;
`known`: with KNOWN."""

EXTRAS = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "allow_only")


def empty_slots(count: int, window: int) -> Slots:
    """Nothing but zeros."""
    return Slots(
        np.zeros((count, window), np.uint32),
        np.zeros(count, layout.SampleExtras),
        np.zeros((count, arena.MAX_BIAS), layout.BiasEntry),
        np.zeros((count, arena.MAX_BAN_WORDS), layout.BanToken),
    )


def cases(logits: torch.Tensor, ways: list[dict[str, Any]], seed: int = 0) -> Cases:
    """Row r is sampled in the r-th way (in turn), with a random history of up to 200 tokens."""
    rng = np.random.default_rng(seed)
    count, vocabulary = logits.shape
    rows = np.zeros(count, layout.SampleRow)
    slots = empty_slots(count, 256)
    slots.history[:] = rng.integers(0, vocabulary, (count, 256), np.uint32)
    banned = []
    slots.history[:, ::3] = slots.history[:, :1]  # one token over and over
    for r in range(count):
        _fill(rows[r], slots, r, {**PLAIN, **ways[r % len(ways)]}, rng, vocabulary)
        slots.extras[r]["stop_tokens"][0] = logits[r].argmax()  # else it makes no difference whether it is masked
        banned.append(_banned(rows[r], slots, logits[r], int(ways[r % len(ways)].get("bans", 0)), rng))
        write_bans(slots, r, banned[-1])
    return Cases(logits, rows, slots, banned)


def write_bans(slots: Slots, slot: int, banned: list[list[int]]) -> None:
    """The slot's row of bans: a place for each length, then the tokens with the number of those behind."""
    words = []
    for tokens in banned:
        words += [(2**32 - 1, 0), *((token, len(tokens) - at) for at, token in enumerate(tokens, 1))]
    slots.extras[slot]["ban_words"] = len(words)
    slots.bans[slot, : len(words)] = words


def _banned(row: np.void, slots: Slots, logits: torch.Tensor, count: int, rng: np.random.Generator) -> list[list[int]]:
    """Sequences that end in one of the best tokens, as many as there is room for: those before it are in turn the last
    ones of the history, which may reach into the prompt, the same but for one, and the whole answer."""
    slot, end, vocabulary = int(row["slot"]), int(row["position"]), len(logits)
    best = logits.topk(min(3, vocabulary)).indices.tolist()
    made: list[list[int]] = []
    for k in range(count):
        length = min(end, int(rng.integers(1, 9)))
        start = int(slots.extras[slot]["prompt_tokens"]) if k % 3 == 2 else end - length
        tokens = slots.history[slot, start:end].tolist()
        if k % 3 == 1:
            at = rng.integers(len(tokens))
            tokens[at] = (tokens[at] + 1) % vocabulary
        tokens.append(best[k % 7 % len(best)])
        if sum(map(len, made)) + len(made) + len(tokens) < arena.MAX_BAN_WORDS:
            made.append(tokens)
    return made


def _fill(
    row: np.void, slots: Slots, slot: int, way: dict[str, Any], rng: np.random.Generator, vocabulary: int
) -> None:
    row["slot"], row["seed"] = slot, rng.integers(0, 2**64, dtype=np.uint64)
    row["position"] = rng.integers(2, 200)
    extras = slots.extras[slot]
    extras["prompt_tokens"] = rng.integers(1, row["position"])
    extras["repetition_penalty"] = 1
    for name in ("temperature", "top_k", "top_p", "logprobs"):
        row[name] = way.get(name, 0)
    row["logprobs"] = min(int(row["logprobs"]), vocabulary + 1)
    for name in EXTRAS:
        extras[name] = way.get(name, extras[name])
    if any(name in way for name in (*EXTRAS, "bias", "bans", "masked")):
        row["flags"] = layout.RowFlag.EXTRAS
    extras["stop_count"], extras["stop_tokens"][:2] = 2, rng.choice(vocabulary, 2)
    if way.get("masked"):
        row["flags"] = layout.RowFlag.EXTRAS | layout.RowFlag.MASK_STOPS
    if way.get("known"):
        row["flags"] = layout.RowFlag.KNOWN
    count = min(way.get("bias", 0), vocabulary)
    extras["bias_count"] = count
    slots.bias["token"][slot, :count] = np.sort(rng.choice(vocabulary, count, replace=False))
    slots.bias["value"][slot, :count] = rng.choice([-np.inf, -5, 0.5, 3], count)
    slots.bias["value"][slot, :1] = 1  # something is left where only listed tokens are allowed


def spread(count: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Logits as models have them: a bulk, and a few tokens well above it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=generator) * 3
    best = torch.randint(0, vocabulary, (count, 12), generator=generator)
    return logits.scatter(1, best, 8 + 6 * torch.rand(count, 12, generator=generator))


def odd(vocabulary: int) -> torch.Tensor:
    """What models should not, but can have: equal logits, huge ones, zeros of both signs, infinities, NaN."""
    generator = torch.Generator().manual_seed(vocabulary)
    noise = torch.randn(8, vocabulary, generator=generator)
    nan, inf = float("nan"), float("inf")
    noise[0] = 1.5
    noise[1] = noise[1].round()
    noise[2] *= 1e30
    noise[3] = torch.where(noise[3] > 0, 0.0, -0.0)
    noise[4, ::2] = -inf
    noise[5, ::3] = nan
    noise[6, vocabulary // 2 :] = inf
    noise[7] = -inf
    noise[7, vocabulary // 3] = -1e38
    return noise
