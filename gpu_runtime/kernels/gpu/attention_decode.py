"""Paged attention of decode tokens: the context of a sequence is parted into tiles, the last one to end joins them.

There are two ways to call the kernel (`attention_decode_kernel`). `decode_attention` takes queries that are rotated
already, and a cache that holds the step's own tokens. `fused_decode_attention` takes the projection's rows as they are,
so that no kernel has to come in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton

from gpu_runtime.cuda.errors import check
from gpu_runtime.kernels.attention import RopeTables, Shape
from gpu_runtime.kernels.gpu.attention_decode_kernel import (
    TILE_FIRST,
    TILE_WORDS,
    TILE_WORK,
    WORK_CONTEXT,
    WORK_QUERY_START,
    WORK_SLOT,
    WORK_WORDS,
    decode_kernel,
)
from gpu_runtime.kernels.gpu.rope_store import HeadNorms
from gpu_runtime.model.device_plan import DevicePlan, decode_tiles_max
from gpu_runtime.scheduler import layout

__all__ = [
    "LOG2_E",
    "MAX_GROUP",
    "TILE_FIRST",
    "TILE_WORDS",
    "TILE_WORK",
    "WORK_CONTEXT",
    "WORK_QUERY_START",
    "WORK_SLOT",
    "WORK_WORDS",
    "DecodeConfig",
    "DecodeScratch",
    "Release",
    "check_arguments",
    "decode_attention",
    "decode_config",
    "fused_decode_attention",
]

MAX_GROUP = 32
"""Query heads of a KV head at most."""
Release = Literal["start", "late"]
"""When the kernel after an overlapping one may start: with the last program's start, or when the last program has read
the cache. A kernel with much shared memory that starts earlier takes the place of programs that are still to come."""
LOG2_E = math.log2(math.e)
_PREFETCHED_BLOCKS = 3  # of a program, each of as many positions as it takes at a time, in steps of few works
_PREFETCHING_WORKS = 16  # beyond, programs that could prefetch more would push each other's lines out
_REGISTERS = 168  # of a thread: three programs of 128 threads on a multiprocessor, as their shared memory allows
_JOINED_FLOATS = 4096  # of partial outputs loaded at a time by the program that joins them: 32 registers a thread


@dataclass(frozen=True)
class DecodeConfig:
    """How a decode kernel is built: KV positions of one product, warps of a program, depth of the load pipeline."""

    positions: int
    warps: int
    stages: int


@dataclass(frozen=True)
class DecodeScratch:
    """What the tiles of a work leave for the last one; one serves all layers, which run one after the other.

    `outputs` float32 [tiles, query_heads, head_dim], `logs` float32 [tiles, query_heads]; `arrived` int32
    [works, kv_heads] counts tiles and is zero between kernels.
    """

    outputs: torch.Tensor
    logs: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(cls, works_max: int, shape: Shape, device: torch.device) -> DecodeScratch:
        """For steps of up to `works_max` decode works."""
        tiles = decode_tiles_max(works_max)
        return cls(
            outputs=torch.empty(tiles, shape.query_heads, shape.head_dim, dtype=torch.float32, device=device),
            logs=torch.empty(tiles, shape.query_heads, dtype=torch.float32, device=device),
            arrived=torch.zeros(works_max, shape.kv_heads, dtype=torch.int32, device=device),
        )


def decode_config(head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """The configuration in use."""
    if dtype == torch.float32:
        return DecodeConfig(positions=32 if head_dim <= 128 else 16, warps=8, stages=2)
    if head_dim > 128:
        return DecodeConfig(positions=64, warps=8, stages=2)
    return DecodeConfig(positions=64, warps=4, stages=3)


def check_arguments(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape, out: torch.Tensor, positions: int
) -> None:
    """Raises ValueError where a kernel would read or write amiss; costs no device time.

    `positions`: KV positions that the kernel takes at a time.
    """
    width = shape.query_heads * shape.head_dim
    cache = (shape.kv_heads, shape.block_tokens, shape.head_dim)
    if shape.query_heads % shape.kv_heads or shape.query_heads // shape.kv_heads > MAX_GROUP:
        raise ValueError(f"{shape.query_heads} query heads on {shape.kv_heads} KV heads are not supported")
    if shape.head_dim % 16 or not 16 <= shape.head_dim <= 256:
        raise ValueError(f"head size {shape.head_dim} is not a multiple of 16 up to 256")
    if positions % shape.block_tokens or layout.DECODE_TILE_STEP % shape.block_tokens:
        raise ValueError(f"{positions} KV positions at a time are not whole blocks of {shape.block_tokens}")
    if {tensor.dtype for tensor in (queries, keys, values, out)} not in ({torch.bfloat16}, {torch.float32}):
        raise ValueError("attention takes bfloat16 or float32, the same for all tensors")
    if queries.shape[1:] != (width,) or out.shape[1:] != (width,) or len(out) < len(queries):
        raise ValueError(f"queries {list(queries.shape)} or out {list(out.shape)} are not [tokens, {width}]")
    if queries.stride(1) != 1 or queries.stride(0) % 16 or not out.is_contiguous():
        raise ValueError("queries need contiguous rows a multiple of 16 apart, out has to be contiguous")
    for tensor in (keys, values):
        if tensor.shape[1:] != cache or not tensor.is_contiguous():
            raise ValueError(f"a KV cache is contiguous [blocks, {', '.join(map(str, cache))}]")


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    works_max: int,
    shape: Shape,
    scratch: DecodeScratch,
    out: torch.Tensor,
    config: DecodeConfig | None = None,
    programmatic: bool = False,
    release: Release = "late",
) -> None:
    """Attention of the step's decode tokens; writes their rows of `out` and no other.

    queries [tokens, query_heads * head_dim], already rotated; rows may be any multiple of 16 elements apart. keys and
    values [blocks, kv_heads, block_tokens, head_dim] hold the step's own tokens already. out like queries, contiguous;
    all of one dtype, bfloat16 or float32. `works_max` bounds the step's decode works and fixes the grid. Allocates
    nothing, so that it may be captured. `programmatic`: starts beside the kernel before it (programmatic dependent
    launch), whose results it awaits, and lets the one after it start, when `release` says. Raises ValueError for shapes
    it does not know.
    """
    config = config or decode_config(shape.head_dim, queries.dtype)
    check_arguments(queries, keys, values, shape, out, config.positions)
    how = config, programmatic, release
    _launch(queries, keys, values, plan, works_max, shape, scratch, out, *how, None, None)


def fused_decode_attention(
    query_key_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    works_max: int,
    shape: Shape,
    scratch: DecodeScratch,
    out: torch.Tensor,
    tables: RopeTables,
    norms: HeadNorms | None,
    config: DecodeConfig | None = None,
    programmatic: bool = False,
    release: Release = "late",
) -> None:
    """`rope_store` and `decode_attention` in one, for steps of decodes alone; the arguments are those of the two.

    query_key_value [tokens, (query_heads + 2 * kv_heads) * head_dim], contiguous, as projected; stays as it is. A
    token's position is its work's last one, which the tables have to cover, and its key and value go to the plan's
    `kv_slots`. Padding is neither attended nor stored. Keys and values of the cache before a work's last position, the
    plan and the tables must be there before the step begins. Raises ValueError as `decode_attention` does.
    """
    config = config or decode_config(shape.head_dim, query_key_value.dtype)
    width, half = shape.query_heads * shape.head_dim, shape.head_dim // 2
    row = width + 2 * shape.kv_heads * shape.head_dim
    if query_key_value.shape[1:] != (row,) or not query_key_value.is_contiguous():
        raise ValueError(f"rows of queries, keys and values are contiguous [tokens, {row}]")
    check_arguments(query_key_value[:, :width], keys, values, shape, out, config.positions)
    for table in (tables.cosines, tables.sines):
        if table.dtype != torch.float32 or table.shape[1:] != (half,) or not table.is_contiguous():
            raise ValueError(f"rotary tables are contiguous float32 [positions, {half}]")
    if norms is not None and {(*norm.shape, norm.dtype) for norm in (norms.query, norms.key)} != {
        (shape.head_dim, keys.dtype)
    }:
        raise ValueError(f"norms of heads are [{shape.head_dim}] of the cache's type")
    how = config, programmatic, release
    _launch(query_key_value, keys, values, plan, works_max, shape, scratch, out, *how, tables, norms)


def _launch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    works_max: int,
    shape: Shape,
    scratch: DecodeScratch,
    out: torch.Tensor,
    config: DecodeConfig,
    programmatic: bool,
    release: Release,
    tables: RopeTables | None,
    norms: HeadNorms | None,
) -> None:
    tiles = decode_tiles_max(works_max)
    if tiles > len(plan.decode_tiles) or tiles > len(scratch.logs) or works_max > len(scratch.arrived):
        raise ValueError(f"the plan or the scratch is too small for {works_max} decode works")
    group = shape.query_heads // shape.kv_heads
    columns = triton.next_power_of_2(shape.head_dim)
    packed = triton.next_power_of_2(group)
    prefetched = (_PREFETCHED_BLOCKS if works_max <= _PREFETCHING_WORKS else 1) if programmatic else 0
    # Left to itself the compiler takes a few more here, and fewer with smaller heads; more query heads spill.
    bounded = tables is not None and config.warps == 4 and columns == 128 and packed <= 16
    kernel = decode_kernel[(shape.kv_heads, tiles)](
        queries,
        keys,
        values,
        out,
        plan.header,
        plan.works,
        plan.decode_tiles,
        plan.block_table,
        scratch.outputs,
        scratch.logs,
        scratch.arrived,
        None if tables is None else plan.kv_slots,
        None if tables is None else tables.cosines,
        None if tables is None else tables.sines,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        queries.stride(0),
        plan.block_table.stride(0),
        LOG2_E / math.sqrt(shape.head_dim),
        GROUP=group,
        PACKED=packed,
        ROWS=max(16, packed),
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        COLUMNS=columns,
        BLOCK_TOKENS=shape.block_tokens,
        POSITIONS=config.positions,
        PREFETCHED=prefetched,
        JOINED=min(8, max(1, _JOINED_FLOATS // (packed * columns))),
        FUSED=tables is not None,
        NORMED=norms is not None,
        PROGRAMMATIC=programmatic,
        LATE=programmatic and release == "late",
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=_REGISTERS if bounded else None,
        launch_pdl=programmatic,
    )
    if programmatic:
        _take_shared_memory(kernel.function)


@cache
def _take_shared_memory(function: int) -> None:
    """All of a multiprocessor's cache as shared memory, from the next launch on: kernels overlap only where they agree
    on the split, and those of the projections take all."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(driver.cuFuncSetAttribute(driver.CUfunction(function), attribute, 100))
