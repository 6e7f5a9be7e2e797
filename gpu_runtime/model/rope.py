"""Rotary position embedding: the frequencies of the supported kinds."""

from __future__ import annotations

import math

import torch

from gpu_runtime.kernels.attention import RopeTables
from gpu_runtime.model.config import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, positions: int) -> RopeTables:
    """Cosines and sines for positions below `positions`, float32 [positions, head_dim / 2]."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = scale_frequencies(1.0 / config.rope_theta**half, config.rope_scaling)
    angles = torch.arange(positions).float()[:, None] * frequencies
    return RopeTables(angles.cos(), angles.sin())


def scale_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Stretched frequencies; `llama3` as in Meta's published model code: long waves by the factor, short ones not
    at all, a linear blend in between."""
    if scaling.kind == "default":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    original = scaling.original_max_position_embeddings
    waves = 2 * math.pi / frequencies
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = ((original / waves - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
