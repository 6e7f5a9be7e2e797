"""Puts together what a step on the GPU is computed by: weights, KV cache, layers, products, sampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_runtime.chain.chain_kernels import ChainKernels
from gpu_runtime.chain.cuda_step import CudaStep
from gpu_runtime.config import RuntimeConfig
from gpu_runtime.kernels.gpu.sampling import sample_rows
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.device_plan import DevicePlan
from gpu_runtime.model.gpu_llama import GpuLlama, KVCache, Projections, TorchProjections
from gpu_runtime.model.gpu_skinny import SkinnyProjections
from gpu_runtime.model.gpu_weights import GpuWeights, load_weights, random_weights
from gpu_runtime.model.source import ModelFolder

SKINNY_TOKENS = 8
"""Up to so many tokens the skinny kernels are faster than cuBLAS (H200; `python -m tests.bench.gpu_skinny`)."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_step(
    folder: ModelFolder,
    config: RuntimeConfig,
    limits: NDArray[np.void],
    plan: DevicePlan,
    kernels: ChainKernels,
    progress: Callable[[int], None],
) -> CudaStep:
    """Loads the model onto the current device.

    Args:
        limits: layout.SchedulerConfig.
        progress: told how many tensors are loaded.
    """
    dtype = DTYPES[config.dtype]
    weights = _weights(folder, config, dtype, progress)
    cache = KVCache(folder.config, int(limits["blocks"]), int(limits["block_tokens"]), dtype, "cuda")
    running = int(limits["max_running"])
    model = GpuLlama(folder.config, weights, cache, int(limits["max_model_tokens"]), plan, running)
    return CudaStep(
        model,
        _chooser(folder.config, weights, model.torch_projections),
        lambda logits, rows: sample_rows(logits, plan, rows),
        kernels,
    )


def _chooser(config: ModelConfig, weights: GpuWeights, by_torch: TorchProjections) -> Callable[[int], Projections]:
    """Products of few tokens by the kernels that read a matrix at full speed, others by torch."""
    skinny = SkinnyProjections(config, weights) if SkinnyProjections.takes(config, weights.dtype, 1) else None

    def choose(tokens: int) -> Projections:
        if skinny is not None and tokens <= SKINNY_TOKENS and SkinnyProjections.takes(config, weights.dtype, tokens):
            return skinny
        return by_torch

    return choose


def _weights(
    folder: ModelFolder, config: RuntimeConfig, dtype: torch.dtype, progress: Callable[[int], None]
) -> GpuWeights:
    if config.random_weights:
        return random_weights(folder.config, dtype, seed=0)
    return load_weights(folder, dtype, lambda done, _: progress(done))
