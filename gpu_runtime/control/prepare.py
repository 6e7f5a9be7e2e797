"""Everything about a model that can be found out, and refused, before a chain is started for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blink_proto.adapters import try_adapters
from blink_proto.links import LinkError
from blink_proto.tokenizer.files import BundleError, TokenizerFiles, read_folder
from gpu_runtime.config import ConfigError, ModelLimits, RuntimeConfig, longest_sequence, scheduler_config, window_of
from gpu_runtime.control.errors import BadRequestError, ExhaustedError, NotReadyError
from gpu_runtime.control.memory import fit_memory
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.source import ModelFolder
from gpu_runtime.scheduler.host import SchedulerError, check_scheduler
from gpu_runtime.shared_arena import SHM_FOLDER, arena_bytes, free_room

_MOST_GROUPED = 32
"""Query heads that decode attention packs for a key/value head."""


@dataclass(frozen=True)
class Prepared:
    """A model and the configuration that it will run with. `window` and `longest` are in tokens."""

    folder: ModelFolder
    name: str
    config: RuntimeConfig
    limits: ModelLimits
    window: int
    longest: int
    tokenizer: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Contents of its tokenizer files, from `check_tokenizer`."""


def prepare(config: RuntimeConfig, folder: ModelFolder, name: str, available: int) -> Prepared:
    """Checks a model against the operator's choices and the memory.

    Args:
        name: what clients call it.
        available: bytes that the runtime may take for it.

    Raises:
        BadRequestError: the configuration does not fit the model, or the device cannot run it.
        ExhaustedError: too little memory.
    """
    model = folder.config
    limits = ModelLimits(model.vocab_size, model.max_position_embeddings, tuple(folder.eos_token_ids))
    try:
        window = window_of(config, limits)
        _check_kernels(config.device, model)
        config = fit_memory(config, folder, window, available)
        check_scheduler(scheduler_config(config, limits))
        longest = longest_sequence(config, limits)
    except (ConfigError, SchedulerError) as error:
        raise BadRequestError(str(error)) from error
    return Prepared(folder, name, config, limits, window, longest)


def check_tokenizer(folder: Path, vocab_size: int) -> dict[str, bytes]:
    """Reads tokenizer and chat templates as a front end will; contents of the files by name.

    Args:
        vocab_size: the model's. Special tokens may be over it: some models have one to fill up training batches with.

    Raises:
        BadRequestError: no front end could use them.
    """
    try:
        contents = read_folder(folder)
        files = TokenizerFiles.read(contents)
        files.check_templates()
    except BundleError as error:
        raise BadRequestError(f"no front end could use {folder}: {error}") from error
    largest = files.largest_text_token
    if largest >= vocab_size:
        raise BadRequestError(f"{folder}: its tokenizer has a token {largest}, the model only {vocab_size} tokens")
    return contents


def check_ways_in(config: RuntimeConfig) -> None:
    """Whether another arena, and ways into it, could be had now: a port that is down must not cost a model that serves.

    Raises:
        NotReadyError: an RDMA device cannot be opened.
        ExhaustedError: /dev/shm has no room.
    """
    try:
        try_adapters(config.transports, config.rdma)
    except LinkError as error:
        raise NotReadyError(str(error)) from error
    needed, free = arena_bytes(config.arena_sizes()), free_room()
    if needed > free:
        raise ExhaustedError(f"{SHM_FOLDER} has {free >> 20} MiB left, and an arena takes {-(-needed >> 20)} MiB")


def _check_kernels(device: str, model: ModelConfig) -> None:
    if device == "cuda" and model.head_dim % 16:
        raise ConfigError(f"head_dim {model.head_dim} is not supported on a CUDA device (multiples of 16 up to 256)")
    group = model.num_attention_heads // model.num_key_value_heads
    if device == "cuda" and group > _MOST_GROUPED:
        raise ConfigError(f"{group} query heads to a key/value head are not supported on a CUDA device (at most 32)")
