"""Sampling on the CPU (`sampling.cpp`): the host's build of the text that the GPU runs too (`sampling_core.h`).

A token is chosen in this order; `reference_probabilities` says the same in plain torch.

1. Tokens without a bias entry are forbidden with `allow_only`; the bias entries are added to the logits.
2. Repetition penalty, for tokens of the prompt and the answer: positive logits are divided, negative ones multiplied.
3. Presence and frequency penalty, for tokens of the answer: subtracted once, and once for each time it was generated.
4. Stop tokens are forbidden while MASK_STOPS says so, and the last token of each banned sequence whose others are the
   tokens generated last.
5. Temperatures below GREEDY_BELOW, and top_k = 1, take the largest logit; among equals the lowest id.
6. Temperature; top-k; top-p, of the probabilities that top-k left; min-p, a share of the best token's probability.
7. One draw by Philox4x32-10, keyed by (seed, position), over what is left in order of token id.

Log-probabilities are those of the model's own distribution: before all of this. A row whose token is KNOWN, one of the
prompt, does nothing else: its result is that token.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.native import load_library
from gpu_runtime.scheduler.layout import RowFlag

GREEDY_BELOW = 1e-3
"""Temperatures below this are greedy."""

MAX_VOCABULARY = 1 << 23
"""Token ids at most: sums of weights stay within 64 bits."""


class _Job(ctypes.Structure):
    """blink_sample_job."""

    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("vocab", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("extras", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bans", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("logprobs", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Slots:
    """What the scheduler keeps for each slot: `history` uint32 [slots, window], `extras` SampleExtras [slots], `bias`
    BiasEntry [slots, MAX_BIAS], `bans` BanToken [slots, MAX_BAN_WORDS]."""

    history: NDArray[np.uint32]
    extras: NDArray[np.void]
    bias: NDArray[np.void]
    bans: NDArray[np.void]


@cache
def _library() -> ctypes.CDLL:
    library = load_library("_host_sampling")
    pointer = ctypes.c_void_p
    library.blink_sample.argtypes = [pointer]
    library.blink_sample.restype = None
    library.blink_philox.argtypes = [pointer, ctypes.c_uint32, ctypes.c_uint32]
    library.blink_philox.restype = None
    library.blink_uniform.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
    library.blink_uniform.restype = ctypes.c_double
    return library


def sample(
    logits: torch.Tensor,
    rows: NDArray[np.void],
    slots: Slots | None = None,
    logprobs: NDArray[np.void] | None = None,
) -> NDArray[np.int32]:
    """One token for each row, sampled or known.

    Args:
        logits: float32 [rows, vocabulary], contiguous.
        rows: layout.SampleRow [rows].
        slots: needed when a row has flags.
        logprobs: layout.RowLogprobs [rows], filled for rows that ask for log-probabilities; needed when one does.

    Returns:
        int32 [rows]; -1 where no logit is a number above minus infinity, all such tokens are forbidden, or the known
        token is outside the vocabulary.

    Raises:
        ValueError: shapes or types do not fit, or something needed is missing.
    """
    count, vocabulary = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or len(rows) != count:
        raise ValueError(f"logits must be contiguous float32 [{len(rows)}, vocabulary], not {list(logits.shape)}")
    if vocabulary > MAX_VOCABULARY:
        raise ValueError(f"a vocabulary of {vocabulary} tokens is over {MAX_VOCABULARY}")
    rows = np.ascontiguousarray(rows)
    tokens = np.empty(count, np.int32)
    job = _Job(logits.data_ptr(), vocabulary, rows.ctypes.data, count, tokens=tokens.ctypes.data)
    if rows["flags"].any():
        _take_slots(job, rows, slots)
    if rows["logprobs"].any():
        if logprobs is None or not logprobs.flags.c_contiguous or len(logprobs) != count:
            raise ValueError("rows ask for log-probabilities, and there is no room for them")
        job.logprobs = logprobs.ctypes.data
    _library().blink_sample(ctypes.byref(job))
    return tokens


def _take_slots(job: _Job, rows: NDArray[np.void], slots: Slots | None) -> None:
    if slots is None:
        raise ValueError("rows have flags, and what belongs to their slots is missing")
    count, window = slots.history.shape
    parts = (slots.history, slots.extras, slots.bias, slots.bans)
    shapes = ((count, window), (count,), (count, arena.MAX_BIAS), (count, arena.MAX_BAN_WORDS))
    if tuple(part.shape for part in parts) != shapes:
        raise ValueError("history, extras, bias and bans are not of the same slots")
    if not all(part.flags.c_contiguous for part in parts):
        raise ValueError("history, extras, bias and bans must be contiguous")
    known = (rows["flags"] & RowFlag.KNOWN) != 0
    if rows["slot"].max() >= count or (rows["position"] + known).max() > window:
        raise ValueError("a row names a slot or a position that is not there")
    job.extras, job.bias, job.bans = slots.extras.ctypes.data, slots.bias.ctypes.data, slots.bans.ctypes.data
    job.history, job.window = slots.history.ctypes.data, window


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) for a seed and a position."""
    return float(_library().blink_uniform(seed, position))


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10, for comparison with its published vectors."""
    words = np.array(counter, np.uint32)
    _library().blink_philox(words.ctypes.data, *key)
    return tuple(int(word) for word in words)


def reference_adjusted(
    logits: torch.Tensor,
    prompt: list[int],
    generated: list[int],
    extras: np.void,
    bias: dict[int, float],
    masked: list[int],
    banned: list[list[int]],
) -> torch.Tensor:
    """Plain torch, in float64: the logits [vocabulary] after bias, penalties, masks and bans (steps 1 to 4)."""
    found = torch.full_like(logits, float("-inf"), dtype=torch.float64) if extras["allow_only"] else logits.double()
    for token, value in bias.items():
        found[token] = logits[token].double() + value
    for token in {*prompt, *generated}:
        penalty = float(extras["repetition_penalty"])
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    for token in set(generated):
        found[token] -= float(extras["presence_penalty"]) + generated.count(token) * float(extras["frequency_penalty"])
    found[masked] = float("-inf")
    for *before, last in banned:
        if before == generated[len(generated) - len(before) :]:
            found[last] = float("-inf")
    return found


def reference_probabilities(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> torch.Tensor:
    """Plain torch, in float64: the distribution [vocabulary] that `sample` draws from (step 6)."""
    scaled = logits.double() / temperature
    if top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(min(top_k, len(scaled))).values[-1], float("-inf"))
    probabilities = scaled.softmax(-1)
    if top_p < 1:
        ordered, indices = probabilities.sort(descending=True)
        keep = ordered.cumsum(-1) - ordered < top_p
        probabilities = torch.zeros_like(probabilities).scatter(0, indices[keep], ordered[keep])
    probabilities = probabilities.masked_fill(probabilities < min_p * probabilities.max(), 0)
    return probabilities / probabilities.sum()
