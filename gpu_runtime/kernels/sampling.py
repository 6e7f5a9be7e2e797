"""Sampling on the CPU (`sampling.cpp`): the host's build of the text that the GPU runs too (`sampling_core.h`)."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_runtime.native import load_library

GREEDY_BELOW = 1e-3
"""Temperatures below this are greedy."""

MAX_VOCABULARY = 1 << 23
"""Token ids at most: sums of weights stay within 64 bits."""


@cache
def _library() -> ctypes.CDLL:
    library = load_library("_host_sampling")
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.blink_sample.argtypes = [pointer, size, pointer, size, pointer]
    library.blink_sample.restype = None
    library.blink_philox.argtypes = [pointer, ctypes.c_uint32, ctypes.c_uint32]
    library.blink_philox.restype = None
    library.blink_uniform.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
    library.blink_uniform.restype = ctypes.c_double
    return library


def sample(logits: torch.Tensor, rows: NDArray[np.void]) -> NDArray[np.int32]:
    """One token for each row.

    Args:
        logits: float32 [rows, vocabulary], contiguous.
        rows: layout.SampleRow [rows].

    Returns:
        int32 [rows]; -1 where the logits hold no number above minus infinity. Equal logits: the lowest id wins.
    """
    tokens = np.empty(len(rows), np.int32)
    _library().blink_sample(
        logits.data_ptr(),
        logits.shape[1],
        rows.ctypes.data,
        len(rows),
        tokens.ctypes.data,
    )
    return tokens


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) for a seed and a position."""
    return float(_library().blink_uniform(seed, position))


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10, for comparison with its published vectors."""
    words = np.array(counter, np.uint32)
    _library().blink_philox(words.ctypes.data, *key)
    return tuple(int(word) for word in words)


def reference_probabilities(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Plain torch, in float64: the distribution [vocabulary] that `sample` draws from."""
    scaled = logits.double() / temperature
    if top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], float("-inf"))
    probabilities = scaled.softmax(-1)
    if top_p < 1:
        ordered, indices = probabilities.sort(descending=True)
        keep = ordered.cumsum(-1) - ordered < top_p
        probabilities = torch.zeros_like(probabilities).scatter(0, indices[keep], ordered[keep])
    return probabilities / probabilities.sum()
