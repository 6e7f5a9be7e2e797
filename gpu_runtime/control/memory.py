"""How much memory a model takes, and how many tokens the rest of a device's memory holds."""

from __future__ import annotations

import logging
from dataclasses import replace

import psutil

from gpu_runtime.config import BLOCK_TOKENS, RuntimeConfig
from gpu_runtime.control.errors import BadRequestError, ExhaustedError
from gpu_runtime.cuda.device import first_device
from gpu_runtime.cuda.errors import CudaError
from gpu_runtime.cuda.occupancy import free_bytes
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.source import ModelFolder

log = logging.getLogger(__name__)

_SOFT_OVERHEAD_BYTES = 400 << 20
"""What torch and the interpreter take beside weights and KV cache (0.35 GiB seen with torch 2.13 on the CPU)."""
_CUDA_OVERHEAD_BYTES = 3 << 30
"""Context, libraries, compiled kernels, step graphs and the allocators' slack on a CUDA device."""
_BYTES = {"float32": 4, "bfloat16": 2}


def fit_memory(config: RuntimeConfig, folder: ModelFolder, window: int, available: int) -> RuntimeConfig:
    """The configuration with a KV cache that fits.

    Args:
        window: the model's context window in tokens.
        available: bytes that the runtime may take in all.

    Raises:
        ExhaustedError: says what is needed and what there is.
    """
    fixed = fixed_bytes(config, folder)
    token = token_bytes(folder.config, config.dtype)
    kv_tokens = config.kv_tokens or _most_tokens(config, window, (available - fixed) // token)
    _check_room(fixed, max(kv_tokens, BLOCK_TOKENS) * token, BLOCK_TOKENS * token, available)
    return replace(config, kv_tokens=kv_tokens)


def _check_room(fixed: int, cache: int, least_cache: int, available: int) -> None:
    free = f"{available / 2**30:.1f} GiB are free"
    if fixed + least_cache > available:
        raise ExhaustedError(f"needs {fixed / 2**30:.1f} GiB without a KV cache; {free}")
    if fixed + cache > available:
        need = f"needs {(fixed + cache) / 2**30:.1f} GiB, {cache / 2**30:.1f} GiB of it KV cache"
        raise ExhaustedError(f"{need}; {free}; a smaller --kv-tokens helps")


def token_bytes(model: ModelConfig, dtype: str) -> int:
    """KV cache that a token takes in all layers."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * _BYTES[dtype]


def fixed_bytes(config: RuntimeConfig, folder: ModelFolder) -> int:
    """Everything but the KV cache."""
    weights, model = folder.parameters * _BYTES[config.dtype], folder.config
    window = config.max_model_tokens or model.max_position_embeddings
    rotary = window * model.head_dim * 4  # cosine and sine of half as many angles for each position
    if config.device == "cpu":
        return weights + rotary * 3 // 2 + _SOFT_OVERHEAD_BYTES  # and the angles themselves, for a moment
    logits = config.max_running * model.vocab_size * 4
    # Hidden state, its norm, queries with keys and values, attention, gate and up and their product.
    widths = 4 * model.hidden_size + 3 * model.intermediate_size + 2 * model.num_attention_heads * model.head_dim
    activations = config.token_budget * widths * _BYTES[config.dtype]
    history = config.max_sequences * window * 4
    return weights + rotary + 2 * logits + 2 * activations + 2 * history + _CUDA_OVERHEAD_BYTES


class DeviceUse:
    """Memory of the device: what a new chain may take, and what the present one has taken.

    Args:
        config: whose `device` it is, and whose share of a CUDA device's memory may be used in all.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._on_cpu = config.device == "cpu"
        self._share = config.memory_share
        self._free_before: int | None = None
        self._taken = 0

    def available(self, replaced: int | None = None) -> int:
        """Bytes that a new chain may take: of a CUDA device no more than the share, and none that others have taken.

        Args:
            replaced: process of the present chain, if that will have ended by then.

        Raises:
            BadRequestError: there is no CUDA device.
        """
        if self._on_cpu:
            return int(psutil.virtual_memory().available) + (_own_bytes(replaced) if replaced else 0)
        try:
            share = int(first_device().memory_bytes * self._share)
        except CudaError as error:
            raise BadRequestError(str(error)) from error
        free = self._free()
        if free is None:
            return share
        free += self._taken if replaced else 0
        if free < share:
            log.warning("others use the device: %.1f GiB of its memory are free", free / 2**30)
        return min(share, free)

    def before_start(self) -> None:
        """Called when a chain is about to start, and no other one is left."""
        self._free_before, self._taken = self._free(), 0

    def when_ready(self) -> None:
        """Called when it is ready: it takes no more from here on."""
        free = self._free()
        if free is not None and self._free_before is not None:
            self._taken = max(0, self._free_before - free)

    def _free(self) -> int | None:
        """Of a CUDA device; None where that is not told, as on boards that share their memory with the host."""
        if self._on_cpu:
            return None
        try:
            return free_bytes()
        except CudaError as error:
            log.warning("taking the device as ours alone: %s", error)
            return None


def _own_bytes(process: int) -> int:
    """Memory that is free once a process has ended."""
    try:
        used = psutil.Process(process).memory_info()  # what is its own alone is not shown to others of the same user
        return int(used.rss - getattr(used, "shared", 0))
    except psutil.Error:  # it has ended
        return 0


def _most_tokens(config: RuntimeConfig, window: int, room: int) -> int:
    """All that fits, but no more than all running sequences could use; whole blocks."""
    return max(0, min(room, config.max_running * window)) // BLOCK_TOKENS * BLOCK_TOKENS
