"""Sizes of a runtime: what the operator may choose, and what follows from it and the model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from blink_proto.links import LinkError, check_link, uses_rdma
from blink_proto.rdma.binding import BINDING_CHOICES
from blink_proto.rdma.choice import RdmaChoice
from gpu_runtime.registration import ways
from gpu_runtime.scheduler import layout

BLOCK_TOKENS = 16
INTAKE_TOKENS = 1 << 16
"""Prompt tokens that the scheduler copies in a step, about: beyond that a step waits for it."""


class ConfigError(ValueError):
    """The operator's choice cannot work."""


@dataclass(frozen=True)
class RuntimeConfig:
    """What the operator chooses. Sizes in tokens unless the name says otherwise."""

    device: str = "cpu"
    dtype: str = "float32"
    random_weights: bool = False
    """For measurements: weights of the right shapes instead of those in the folder."""
    channels: int = 8
    submit_slots: int = 256
    log_slots: int = 8192
    heap_tokens: int = 1 << 18
    kv_tokens: int = 16384
    """On a CUDA device 0: what its memory holds."""
    memory_share: float = 0.9
    """Share of a CUDA device's memory to use in all."""
    token_budget: int = 128
    max_running: int = 64
    max_sequences: int = 256
    max_model_tokens: int = 0
    """0: the model's own window."""
    threads: int = 0
    """0: one for each core."""
    lease_timeout_seconds: float = 15.0
    prefix_cache: bool = True
    """Prompts share the KV of what they begin with, also with earlier ones."""
    transports: tuple[str, ...] = ("shm",)
    """Ways for front ends to reach the arena; see `registration.choose`."""
    rdma_device: str = ""
    """Empty: the one that has `rdma_address`."""
    rdma_address: str = ""
    """Of the interface whose network the operator declares private."""
    verbs_binding: str = "auto"
    """Package that verbs are called by."""
    gpu_memory: str = "auto"
    """How RDMA devices get at a CUDA device's memory; see `registration.ways`."""

    @property
    def uses_rdma(self) -> bool:
        """Front ends may come from other machines."""
        return uses_rdma(self.transports)

    @property
    def rdma(self) -> RdmaChoice:
        """The RDMA device."""
        return RdmaChoice(self.rdma_device, self.rdma_address, self.verbs_binding)

    @property
    def rdma_wish(self) -> ways.Wish:
        """How RDMA devices shall get at a CUDA device's memory."""
        return ways.Wish(self.gpu_memory, "doca" in self.transports)

    @property
    def serves_local(self) -> bool:
        """Front ends may come from this machine, by shared memory."""
        return "shm" in self.transports

    def arena_sizes(self) -> arena.Sizes:
        """Sizes of the arena's rings."""
        return arena.Sizes(
            channels=self.channels,
            submit_slots=self.submit_slots,
            cancel_slots=self.submit_slots,
            log_slots=self.log_slots,
            heap_tokens=self.heap_tokens,
        )


DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "kv_tokens": 16384, "token_budget": 128, "max_running": 64, "max_sequences": 256},
    "cuda": {"dtype": "bfloat16", "kv_tokens": 0, "token_budget": 512, "max_running": 256, "max_sequences": 512},
}
"""What a choice that was left open becomes."""


def make_config(device: str, **choices: Any) -> RuntimeConfig:
    """A configuration for a device; choices that are None, "" or 0 are the device's defaults.

    Raises:
        ConfigError: the device does not exist or cannot do it.
    """
    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is unknown; there are: {', '.join(DEVICES)}")
    chosen = {name: value for name, value in choices.items() if value or value is False}
    made = RuntimeConfig(**{"device": device, **DEVICES[device], **chosen})
    if made.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype {made.dtype!r} is unknown; there are: float32, bfloat16")
    if device == "cpu" and (made.dtype != "float32" or made.random_weights):
        raise ConfigError("the soft GPU computes in float32, with a model's own weights")
    try:
        check_link(made.transports, made.rdma_address)
    except LinkError as error:
        raise ConfigError(str(error)) from error
    if made.verbs_binding not in BINDING_CHOICES:
        raise ConfigError(f"--verbs-binding must be one of: {', '.join(BINDING_CHOICES)}")
    _check_gpu_memory(made)
    budget = max(made.token_budget, made.max_running)
    made = replace(made, token_budget=budget, max_sequences=max(made.max_sequences, made.max_running))
    return made


def _check_gpu_memory(made: RuntimeConfig) -> None:
    if made.gpu_memory not in ways.CHOICES:
        raise ConfigError(f"--gpu-memory must be one of: {', '.join(ways.CHOICES)}")
    if made.gpu_memory != ways.AUTO and made.device != "cuda":
        raise ConfigError(f"--gpu-memory {made.gpu_memory} is for --device cuda: the soft GPU's memory is the host's")
    if made.gpu_memory == ways.PEERMEM and "doca" in made.transports:
        raise ConfigError(f"--gpu-memory {made.gpu_memory}: {ways.NO_DOCA}")


@dataclass(frozen=True)
class ModelLimits:
    """What a model brings to the scheduler's configuration."""

    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]


def step_buckets(token_budget: int) -> list[int]:
    """Token counts of the step graphs, ascending: powers of two and, from 16 on, the half-way sizes.

    Padding wastes at most half of a small step and a third of a larger one.
    """
    sizes, power = [1, 2, 4, 8], 16
    while power < token_budget * 2:
        sizes += [power, power + power // 2]
        power *= 2
    return [size for size in sizes if size < token_budget] + [token_budget]


def window_of(config: RuntimeConfig, model: ModelLimits) -> int:
    """Context window in tokens: the model's own, or less when the operator says so.

    Raises:
        ConfigError: more than the model can, or too few for a prompt and an answer.
    """
    wanted = config.max_model_tokens or model.max_model_tokens
    if wanted < 2:
        raise ConfigError("a context window of one token has no room for a prompt and an answer")
    if wanted > model.max_model_tokens:
        raise ConfigError(f"--max-model-tokens {wanted} is over the model's window of {model.max_model_tokens}")
    return wanted


def longest_sequence(config: RuntimeConfig, model: ModelLimits) -> int:
    """Tokens of one sequence that both the window and the KV cache allow (the last one is never computed)."""
    return min(window_of(config, model), config.kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS + 1)


def scheduler_config(config: RuntimeConfig, model: ModelLimits) -> NDArray[np.void]:
    """The scheduler's configuration, a 0-d `layout.SchedulerConfig`.

    Raises:
        ConfigError: more stop tokens than the scheduler holds, or a window the model does not have.
    """
    if len(model.eos_token_ids) > layout.MAX_EOS_TOKENS:
        raise ConfigError(f"the model has more than {layout.MAX_EOS_TOKENS} stop tokens")
    window = window_of(config, model)
    sizes = config.arena_sizes()
    made = np.zeros((), layout.SchedulerConfig)
    for name in ("channels", "submit_slots", "cancel_slots", "log_slots", "heap_tokens"):
        made[name] = getattr(sizes, name)
    made["vocab_size"] = model.vocab_size
    made["max_model_tokens"] = window
    made["max_sequences"] = config.max_sequences
    made["max_running"] = config.max_running
    made["token_budget"] = config.token_budget
    made["block_tokens"] = BLOCK_TOKENS
    made["blocks"] = config.kv_tokens // BLOCK_TOKENS + 1  # and the scratch block
    made["blocks_per_sequence"] = -(-window // BLOCK_TOKENS)
    made["eos_count"] = len(model.eos_token_ids)
    made["eos_tokens"][: len(model.eos_token_ids)] = model.eos_token_ids
    buckets = step_buckets(config.token_budget)
    made["bucket_count"] = len(buckets)
    made["buckets"][: len(buckets)] = buckets
    made["intake_tokens"] = INTAKE_TOKENS
    made["lease_timeout_ns"] = int(config.lease_timeout_seconds * 1e9)
    made["prefix_cache"] = config.prefix_cache
    made["hash_seed"] = secrets.randbits(64)
    return made
