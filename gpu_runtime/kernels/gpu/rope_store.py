"""Rotary embedding and the step's way into the paged KV cache on the GPU (Triton), with a plain-torch reference.

One kernel from the fused row of queries, keys and values: norms of query and key heads where the model has them, the
rotation (halves of a head, as Hugging Face keeps them), and the stores. Rotated in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpu_runtime.kernels.attention import RopeTables, reference_rope
from gpu_runtime.kernels.gpu.norm import reference_norm

_PAIRS = 1024
"""Rotated pairs of a program, about: 8 to a thread, so that a thread moves 16 bytes of bfloat16 at a time."""


@dataclass(frozen=True)
class HeadNorms:
    """Norms of query and key heads (Qwen3): weights [head_dim] in the model's type."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


@triton.jit
def _rope_store_kernel(
    query_key_value: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
) -> None:
    """One program for HEADS heads of a token; heads count through queries, keys and values."""
    if PROGRAMMATIC:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    lane = tl.arange(0, LANES)[None, :]
    in_head = lane < HALF
    exists = (head < QUERY_HEADS + 2 * KV_HEADS) & in_head
    dtype = keys.dtype.element_ty

    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(kv_slots + token).to(tl.int64)
    cosine = tl.load(cosines + position * HALF + lane, mask=in_head, other=0.0)
    sine = tl.load(sines + position * HALF + lane, mask=in_head, other=0.0)
    if PROGRAMMATIC:
        gdc_wait()  # all before this line was there before the step began

    row = query_key_value + token * ((QUERY_HEADS + 2 * KV_HEADS) * 2 * HALF)
    at = row + head * (2 * HALF) + lane
    plain_first = tl.load(at, mask=exists, other=0.0)
    plain_second = tl.load(at + HALF, mask=exists, other=0.0)
    first, second = plain_first.to(tl.float32), plain_second.to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
        is_query = head < QUERY_HEADS
        query_first = tl.load(query_norm + lane, mask=in_head, other=0.0).to(tl.float32)
        query_second = tl.load(query_norm + HALF + lane, mask=in_head, other=0.0).to(tl.float32)
        key_first = tl.load(key_norm + lane, mask=in_head, other=0.0).to(tl.float32)
        key_second = tl.load(key_norm + HALF + lane, mask=in_head, other=0.0).to(tl.float32)
        weight_first = tl.where(is_query, query_first, key_first)
        weight_second = tl.where(is_query, query_second, key_second)
        first = ((first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype).to(tl.float32)
    turned_first = (first * cosine - second * sine).to(dtype)
    turned_second = (second * cosine + first * sine).to(dtype)

    stored = exists & (head < QUERY_HEADS)
    tl.store(at, turned_first, mask=stored)
    tl.store(at + HALF, turned_second, mask=stored)

    block, place = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    key_head = head - QUERY_HEADS
    stored = exists & (key_head >= 0) & (key_head < KV_HEADS)
    key_at = keys + ((block * KV_HEADS + key_head) * BLOCK_TOKENS + place) * (2 * HALF) + lane
    tl.store(key_at, turned_first, mask=stored)
    tl.store(key_at + HALF, turned_second, mask=stored)

    value_head = key_head - KV_HEADS
    stored = exists & (value_head >= 0)
    value_at = values + ((block * KV_HEADS + value_head) * BLOCK_TOKENS + place) * (2 * HALF) + lane
    tl.store(value_at, plain_first, mask=stored)
    tl.store(value_at + HALF, plain_second, mask=stored)


def rope_store(
    query_key_value: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    tables: RopeTables,
    norms: HeadNorms | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    programmatic: bool = False,
) -> None:
    """Rotates the queries in place and stores rotated keys and plain values in the cache.

    query_key_value [tokens, (query_heads + 2 · kv_heads) · head_dim], contiguous; its keys and values stay as they
    are. positions and kv_slots int32 [tokens or more], in range: the scheduler made them. keys and values
    [blocks, kv_heads, block_tokens, head_dim]; slot s is place s % block_tokens of block s // block_tokens.

    Args:
        programmatic: as for `rms_norm`; positions, slots and tables must be there before the step begins.
    """
    _, kv_heads, block_tokens, head_dim = keys.shape
    tokens, width = query_key_value.shape
    heads, half = width // head_dim, head_dim // 2
    lanes = triton.next_power_of_2(half)
    group = min(triton.next_power_of_2(heads), max(1, _PAIRS // lanes))
    _rope_store_kernel[(tokens, triton.cdiv(heads, group))](
        query_key_value,
        positions,
        kv_slots,
        tables.cosines,
        tables.sines,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        keys,
        values,
        QUERY_HEADS=heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        BLOCK_TOKENS=block_tokens,
        HALF=half,
        NORMED=norms is not None,
        HEADS=group,
        LANES=lanes,
        PROGRAMMATIC=programmatic,
        num_warps=4,
        launch_pdl=programmatic,
    )


def reference_rope_store(
    query_key_value: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    tables: RopeTables,
    norms: HeadNorms | None,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Plain torch, the same arguments and effects as `rope_store`."""
    _, kv_heads, block_tokens, head_dim = keys.shape
    tokens, width = query_key_value.shape
    heads = query_key_value.view(tokens, width // head_dim, head_dim)
    query, key, value = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    parts = [query, key]
    if norms is not None:
        parts = [
            reference_norm(query, norms.query, norms.epsilon),
            reference_norm(key, norms.key, norms.epsilon),
        ]
    rotated = [reference_rope(part.float(), positions[:tokens].long(), tables).to(part.dtype) for part in parts]
    slots = kv_slots[:tokens].long()
    blocks, places = slots // block_tokens, slots % block_tokens
    keys[blocks, :, places], values[blocks, :, places] = rotated[1], value
    query.copy_(rotated[0])
