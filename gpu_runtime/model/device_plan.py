"""The scheduler's plan as torch tensors over the memory it lies in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_runtime.scheduler import layout


def words_of(struct_bytes: int) -> int:
    """32-bit words of a record."""
    return struct_bytes // 4


def decode_tiles_max(works: int) -> int:
    """Attention tiles that a step with so many decode works has at most."""
    return works + max(layout.SPARE_TILES, 2 * works)


def chunk_tiles_max(tokens: int, works: int) -> int:
    """Attention tiles that a step of so many tokens in so many prompt chunks has at most."""
    return tokens // layout.CHUNK_TILE + min(works, tokens)


@dataclass(frozen=True)
class SamplingSlots:
    """What sampling reads beside the rows, and where it puts log-probabilities; records word by word, as in the plan.

    `history` [max_sequences, max_model_tokens] the known tokens of each slot; `extras` [max_sequences, words of
    SampleExtras]; `bias` [max_sequences, 2 * MAX_BIAS]; `bans` [max_sequences, 2 * MAX_BAN_WORDS]; `logprobs`
    [max_running, words of RowLogprobs], written.
    """

    history: torch.Tensor
    extras: torch.Tensor
    bias: torch.Tensor
    bans: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True)
class DevicePlan:
    """What the step's kernels read, and the arrays they write; all int32, fixed in place for a chain's life.

    `header` [16], `works` [max_running, 8], `rows` [max_running, words of SampleRow], `decode_tiles` and `chunk_tiles`
    [.., 4] hold the records of `scheduler/layout.toml` word by word. `token_ids`, `positions`, `kv_slots`
    [last bucket]; `block_table` [max_sequences, blocks_per_sequence]; `sampled` [max_running] is the step's result.
    `slots` is None only for plans that nothing is sampled for.
    """

    header: torch.Tensor
    works: torch.Tensor
    rows: torch.Tensor
    decode_tiles: torch.Tensor
    chunk_tiles: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    block_table: torch.Tensor
    sampled: torch.Tensor
    slots: SamplingSlots | None = None
