"""Paged causal attention of prompt chunks.

One program attends one query head's rows of a chunk tile (`layout.Tile`) over the sequence's keys up to each row's own
position. Only the blocks that the diagonal crosses are masked. The tiles are taken from the last to the first, since
the later ones of a chunk see more context and should not be left for the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gpu_runtime.kernels.attention import Shape
from gpu_runtime.kernels.gpu.attention_decode import (
    LOG2_E,
    TILE_FIRST,
    TILE_WORDS,
    TILE_WORK,
    WORK_CONTEXT,
    WORK_QUERY_START,
    WORK_SLOT,
    WORK_WORDS,
    check_arguments,
)
from gpu_runtime.model.device_plan import DevicePlan, chunk_tiles_max
from gpu_runtime.scheduler import layout

_CHUNK_TILES: tl.constexpr = tl.constexpr(layout.STEP_HEADER_OFFSETS["chunk_tiles"] // 4)
_WORK_QUERY_TOKENS: tl.constexpr = tl.constexpr(layout.WORK_OFFSETS["query_tokens"] // 4)


@dataclass(frozen=True)
class ChunkConfig:
    """How a prefill kernel is built: query rows of a program (they divide CHUNK_TILE), KV positions of one product,
    warps of a program, depth of the load pipeline."""

    rows: int
    positions: int
    warps: int
    stages: int


def chunk_config(head_dim: int, dtype: torch.dtype) -> ChunkConfig:
    """The configuration in use."""
    if dtype == torch.float32:
        rows, positions = (32, 32) if head_dim <= 64 else (32, 16) if head_dim <= 128 else (16, 16)
        return ChunkConfig(rows, positions, warps=8, stages=2)
    if head_dim > 128:
        return ChunkConfig(rows=128, positions=64, warps=8, stages=2)
    return ChunkConfig(rows=128, positions=128, warps=8, stages=3)


def chunk_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    tokens: int,
    works_max: int,
    shape: Shape,
    out: torch.Tensor,
    config: ChunkConfig | None = None,
) -> None:
    """Attention of the step's prompt chunks; writes their rows of `out` and no other.

    Tensors as for `decode_attention`. `tokens` and `works_max` bound the step's tokens and chunks and fix the grid.
    Allocates nothing, so that it may be captured. Raises ValueError for shapes it does not know.
    """
    config = config or chunk_config(shape.head_dim, queries.dtype)
    check_arguments(queries, keys, values, shape, out, config.positions)
    tiles = chunk_tiles_max(tokens, works_max)
    if tiles > len(plan.chunk_tiles):
        raise ValueError(f"the plan holds {len(plan.chunk_tiles)} chunk tiles, not {tiles}")
    parts = layout.CHUNK_TILE // config.rows
    _chunk_kernel[(shape.query_heads, tiles * parts)](
        queries,
        keys,
        values,
        out,
        plan.header,
        plan.works,
        plan.chunk_tiles,
        plan.block_table,
        queries.stride(0),
        plan.block_table.stride(0),
        LOG2_E / math.sqrt(shape.head_dim),
        GROUP=shape.query_heads // shape.kv_heads,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        COLUMNS=triton.next_power_of_2(shape.head_dim),
        BLOCK_TOKENS=shape.block_tokens,
        ROWS=config.rows,
        POSITIONS=config.positions,
        PARTS=parts,
        num_warps=config.warps,
        num_stages=config.stages,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _chunk_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    header: tl.tensor,
    works: tl.tensor,
    tiles: tl.tensor,
    block_table: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    index = tl.load(header + _CHUNK_TILES) * PARTS - 1 - tl.program_id(1)
    if index < 0:
        return
    tile = tiles + index // PARTS * TILE_WORDS
    work = works + tl.load(tile + TILE_WORK) * WORK_WORDS
    first = tl.load(tile + TILE_FIRST) + index % PARTS * ROWS
    query_tokens = tl.load(work + _WORK_QUERY_TOKENS)
    if first >= query_tokens:
        return
    context = tl.load(work + WORK_CONTEXT)
    token = (tl.load(work + WORK_QUERY_START) + first).to(tl.int64)
    table = block_table + tl.load(work + WORK_SLOT).to(tl.int64) * table_stride

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, COLUMNS)
    used = (first + rows[:, None] < query_tokens) & (dims[None, :] < HEAD_DIM)
    query = tl.load(
        queries + token * query_stride + head * HEAD_DIM + rows[:, None] * query_stride + dims[None, :], used, other=0.0
    )
    kv_head = head // GROUP
    keys += kv_head * BLOCK_TOKENS * HEAD_DIM
    values += kv_head * BLOCK_TOKENS * HEAD_DIM

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    position = context - query_tokens + first  # of the first row
    end = tl.minimum(position + ROWS, context)
    seen_by_all = (position + 1) // POSITIONS * POSITIONS
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * BLOCK_TOKENS * HEAD_DIM
    peak, total, acc = _attend(
        query,
        keys,
        values,
        table,
        peak,
        total,
        acc,
        0,
        seen_by_all,
        end,
        position,
        scale,
        HEAD_DIM,
        COLUMNS,
        BLOCK_STRIDE,
        BLOCK_TOKENS,
        ROWS,
        POSITIONS,
        False,
    )
    peak, total, acc = _attend(
        query,
        keys,
        values,
        table,
        peak,
        total,
        acc,
        seen_by_all,
        end,
        end,
        position,
        scale,
        HEAD_DIM,
        COLUMNS,
        BLOCK_STRIDE,
        BLOCK_TOKENS,
        ROWS,
        POSITIONS,
        True,
    )
    acc = acc / total[:, None]
    width: tl.constexpr = KV_HEADS * GROUP * HEAD_DIM
    cells = rows[:, None] * width + dims[None, :]
    tl.store(out + token * width + head * HEAD_DIM + cells, acc.to(out.dtype.element_ty), used)


@triton.jit
def _attend(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Takes the KV positions [begin, stop) into the online softmax; MASKED where the diagonal crosses them."""
    dims = tl.arange(0, COLUMNS)
    used_dims = dims[None, :] < HEAD_DIM
    offsets = tl.arange(0, POSITIONS)
    # Positions are taken from a block's start on, so that a row's place in its block stays the same.
    inner = (offsets % BLOCK_TOKENS).to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    columns = table + offsets // BLOCK_TOKENS
    blocks = tl.load(columns + begin // BLOCK_TOKENS, begin + offsets < end, other=0)
    for start in tl.range(begin, stop, POSITIONS):
        cache = blocks.to(tl.int64)[:, None] * BLOCK_STRIDE + inner
        following = start + POSITIONS
        if MASKED:
            known = following + offsets < end
            # What lies past the context may be no number, and that times a weight of zero would be none either.
            used = used_dims & (start + offsets < end)[:, None]
        else:
            known = following < stop
            used = used_dims
        blocks = tl.load(columns + following // BLOCK_TOKENS, known, other=0)
        key = tl.load(keys + cache, used, other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if MASKED:
            own = position + tl.arange(0, ROWS)
            scores = tl.where((start + offsets)[None, :] <= own[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        keep = tl.exp2(peak - new_peak)
        total = total * keep + tl.sum(weights, 1)
        value = tl.load(values + cache, used, other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc
