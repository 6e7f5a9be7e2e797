"""Paged attention of decode tokens: the context of a sequence is parted into tiles, the last one to end joins them.

One program attends the query heads of one KV head (packed as rows of one matrix product) over one decode tile
(`layout.Tile`). Where a work has several tiles, each leaves a normalised output and the base-2 logarithm of its
softmax sum, and the program that arrives last weighs and adds them, so that no second kernel is needed. Everything
that varies between steps is read from device memory; programs beyond the step's tiles end at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpu_runtime.kernels.attention import Shape
from gpu_runtime.model.device_plan import DevicePlan, decode_tiles_max
from gpu_runtime.scheduler import layout

MAX_GROUP = 32
"""Query heads of a KV head at most."""
LOG2_E = math.log2(math.e)
_JOINED_FLOATS = 4096  # of partial outputs loaded at a time by the program that joins them: 32 registers a thread

_DECODE_TILES: tl.constexpr = tl.constexpr(layout.STEP_HEADER_OFFSETS["decode_tiles"] // 4)
_DECODE_SPAN: tl.constexpr = tl.constexpr(layout.STEP_HEADER_OFFSETS["decode_span"] // 4)
WORK_WORDS: tl.constexpr = tl.constexpr(layout.Work.itemsize // 4)
WORK_SLOT: tl.constexpr = tl.constexpr(layout.WORK_OFFSETS["slot"] // 4)
WORK_QUERY_START: tl.constexpr = tl.constexpr(layout.WORK_OFFSETS["query_start"] // 4)
WORK_CONTEXT: tl.constexpr = tl.constexpr(layout.WORK_OFFSETS["context_tokens"] // 4)
TILE_WORDS: tl.constexpr = tl.constexpr(layout.Tile.itemsize // 4)
TILE_WORK: tl.constexpr = tl.constexpr(layout.TILE_OFFSETS["work"] // 4)
TILE_FIRST: tl.constexpr = tl.constexpr(layout.TILE_OFFSETS["first"] // 4)
_TILE_BASE: tl.constexpr = tl.constexpr(layout.TILE_OFFSETS["base"] // 4)
_TILE_COUNT: tl.constexpr = tl.constexpr(layout.TILE_OFFSETS["count"] // 4)


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
) -> None:
    """Attention of the step's decode tokens; writes their rows of `out` and no other.

    queries [tokens, query_heads * head_dim], already rotated; rows may be any multiple of 16 elements apart. keys and
    values [blocks, kv_heads, block_tokens, head_dim] hold the step's own tokens already. out like queries, contiguous;
    all of one dtype, bfloat16 or float32. `works_max` bounds the step's decode works and fixes the grid. Allocates
    nothing, so that it may be captured. `programmatic`: starts beside the kernel before it (programmatic dependent
    launch), whose results it awaits, and lets the one after it start. Raises ValueError for shapes it does not know.
    """
    config = config or decode_config(shape.head_dim, queries.dtype)
    check_arguments(queries, keys, values, shape, out, config.positions)
    tiles = decode_tiles_max(works_max)
    if tiles > len(plan.decode_tiles) or tiles > len(scratch.logs) or works_max > len(scratch.arrived):
        raise ValueError(f"the plan or the scratch is too small for {works_max} decode works")
    group = shape.query_heads // shape.kv_heads
    columns = triton.next_power_of_2(shape.head_dim)
    packed = triton.next_power_of_2(group)
    _decode_kernel[(shape.kv_heads, tiles)](
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
        JOINED=min(8, max(1, _JOINED_FLOATS // (packed * columns))),
        PROGRAMMATIC=programmatic,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=programmatic,
    )


@triton.jit
def _prefetch(cache: tl.tensor, rows: tl.tensor, HEAD_DIM: tl.constexpr) -> None:
    """Asks the second-level cache for rows of a head, a line of 128 bytes at a time."""
    LINE: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM + LINE - 1) // LINE)
    columns = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [cache + rows[:, None] + columns[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# A table's width differs between models only; without the hint one build serves them all.
@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    header: tl.tensor,
    works: tl.tensor,
    tiles: tl.tensor,
    block_table: tl.tensor,
    outputs: tl.tensor,
    logs: tl.tensor,
    arrived: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    POSITIONS: tl.constexpr,
    JOINED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
) -> None:
    if PROGRAMMATIC:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    tile = tiles + index * TILE_WORDS
    step_tiles = tl.load(header + _DECODE_TILES)
    span = tl.load(header + _DECODE_SPAN)
    # Read beside the header rather than after it: a tile that is not the step's is there all the same.
    work_index = tl.load(tile + TILE_WORK)
    first = tl.load(tile + TILE_FIRST)
    base = tl.load(tile + _TILE_BASE)
    count = tl.load(tile + _TILE_COUNT)
    if index >= step_tiles:
        if PROGRAMMATIC:
            gdc_wait()  # the kernel after this one takes its end for the end of those before
        return
    work = works + work_index * WORK_WORDS
    token = tl.load(work + WORK_QUERY_START)
    end = tl.minimum(first + span, tl.load(work + WORK_CONTEXT))
    table = block_table + tl.load(work + WORK_SLOT).to(tl.int64) * table_stride

    # A tile starts with a block, so a row's place in its block stays the same.
    offsets = tl.arange(0, POSITIONS)
    columns = table + (first + offsets) // BLOCK_TOKENS
    blocks = tl.load(columns, first + offsets < end, other=0)
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * BLOCK_TOKENS * HEAD_DIM
    keys += kv_head * BLOCK_TOKENS * HEAD_DIM
    values += kv_head * BLOCK_TOKENS * HEAD_DIM
    if PROGRAMMATIC:
        # All up to here is the scheduler's, which wrote it before the step began; so is most of the cache.
        ahead = blocks.to(tl.int64) * BLOCK_STRIDE + (offsets % BLOCK_TOKENS) * HEAD_DIM
        _prefetch(keys, ahead, HEAD_DIM)
        _prefetch(values, ahead, HEAD_DIM)
        gdc_wait()

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, COLUMNS)
    used_dims = dims[None, :] < HEAD_DIM
    used_rows = (rows[:, None] < GROUP) & used_dims
    head_offset = kv_head * GROUP * HEAD_DIM
    query_rows = rows[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(queries + token.to(tl.int64) * query_stride + head_offset + query_rows, used_rows, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    inner = (offsets % BLOCK_TOKENS).to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    for start in tl.range(first, end, POSITIONS):
        cache = blocks.to(tl.int64)[:, None] * BLOCK_STRIDE + inner
        columns += POSITIONS // BLOCK_TOKENS
        blocks = tl.load(columns, start + POSITIONS + offsets < end, other=0)
        inside = start + offsets < end
        # What lies past the context may be no number, and that times a weight of zero would be none either.
        used = inside[:, None] & used_dims
        key = tl.load(keys + cache, used, other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        keep = tl.exp2(peak - new_peak)
        total = total * keep + tl.sum(weights, 1)
        value = tl.load(values + cache, used, other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
        peak = new_peak

    acc = acc / total[:, None]
    out += token.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + head_offset
    if count == 1:
        tl.store(out + query_rows, acc.to(out.dtype.element_ty), used_rows)
    else:
        first_head = (index * KV_HEADS + kv_head).to(tl.int64) * GROUP
        tl.store(outputs + first_head * HEAD_DIM + query_rows, acc, used_rows)
        tl.store(logs + first_head + rows, peak + tl.log2(total), rows < GROUP)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        arrivals = arrived + work_index * KV_HEADS + kv_head
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1:
            _join(out, outputs, logs, base, count, kv_head, GROUP, PACKED, KV_HEADS, HEAD_DIM, COLUMNS, JOINED)
            tl.store(arrivals, 0)


@triton.jit
def _join(
    out: tl.tensor,
    outputs: tl.tensor,
    logs: tl.tensor,
    base: tl.tensor,
    count: tl.tensor,
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """Weighs the outputs of `count` tiles from `base` by their sums and stores the whole.

    Each thread keeps its own cells of all tiles, so that nothing is summed across threads. The loads of a round do not
    depend on each other. They pass by the first-level cache, which may hold what an earlier kernel left there.
    """
    dims = tl.arange(0, COLUMNS)
    # A row past the group stands for its last head, so that it needs no mask until it is stored.
    heads = kv_head * GROUP + tl.minimum(tl.arange(0, PACKED), GROUP - 1)
    peak = tl.full([PACKED], float("-inf"), tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    acc = tl.zeros([PACKED, COLUMNS], tl.float32)
    for start in tl.range(0, count, JOINED):
        new_peak = peak
        for tile in tl.static_range(JOINED):
            rows = (base + tl.minimum(start + tile, count - 1)) * (KV_HEADS * GROUP) + heads
            new_peak = tl.maximum(new_peak, tl.load(logs + rows, cache_modifier=".cg"))
        keep = tl.exp2(peak - new_peak)
        total *= keep
        acc *= keep[:, None]
        for tile in tl.static_range(JOINED):
            rows = (base + tl.minimum(start + tile, count - 1)) * (KV_HEADS * GROUP) + heads
            log = tl.load(logs + rows, cache_modifier=".cg")
            weight = tl.where(start + tile < count, tl.exp2(log - new_peak), 0.0)
            cells = rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            part = tl.load(outputs + cells, dims[None, :] < HEAD_DIM, other=0.0, cache_modifier=".cg")
            total += weight
            acc += part * weight[:, None]
        peak = new_peak
    rows = tl.arange(0, PACKED)[:, None]
    stored = (rows < GROUP) & (dims[None, :] < HEAD_DIM)
    tl.store(out + rows * HEAD_DIM + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), stored)
