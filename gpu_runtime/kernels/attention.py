"""Paged causal attention and rotary embedding on the CPU (`attention.cpp`), with plain-torch references."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_runtime.native import load_library


class Shape(ctypes.Structure):
    """Sizes that both kernels need; mirrors `Shape` in attention.cpp."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("query_heads", "kv_heads", "head_dim", "block_tokens", "table_columns")
    ]


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines, float32 [positions, head_dim / 2]."""

    cosines: torch.Tensor
    sines: torch.Tensor


@cache
def _library() -> ctypes.CDLL:
    # One thread pool: importing torch (above) loads the libgomp that comes with it, and the loader takes that one for
    # our library too, since it goes by the name libgomp.so.1 (a test looks at the process's maps and threads).
    library = load_library("_host_kernels")
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.blink_rope_store.argtypes = [pointer] * 5 + [size] + [pointer] * 5
    library.blink_rope_store.restype = None
    library.blink_paged_attention.argtypes = [pointer] * 4 + [size] * 2 + [pointer, size, pointer, pointer]
    library.blink_paged_attention.restype = None
    return library


def rope_store(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: NDArray[np.int32],
    kv_slots: NDArray[np.int32],
    shape: Shape,
    tables: RopeTables,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """Rotates queries and keys in place and stores keys and values in the cache.

    queries [tokens, query_heads * head_dim], keys and values [tokens, kv_heads * head_dim], caches
    [kv slots, kv_heads, head_dim]; all float32 and contiguous. Positions and slots must be in range: the scheduler
    made them.
    """
    _library().blink_rope_store(
        queries.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        positions.ctypes.data,
        kv_slots.ctypes.data,
        len(positions),
        ctypes.byref(shape),
        tables.cosines.data_ptr(),
        tables.sines.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
    )


def paged_attention(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    works: NDArray[np.void],
    block_table: NDArray[np.int32],
    shape: Shape,
) -> torch.Tensor:
    """Attention of every query token over its sequence's keys up to its own position.

    Returns [tokens, query_heads * head_dim]; rows that belong to no work are zero.
    """
    out = torch.empty_like(queries)
    _library().blink_paged_attention(
        queries.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        works.ctypes.data,
        len(works),
        works.dtype.itemsize,
        block_table.ctypes.data,
        queries.shape[0],
        ctypes.byref(shape),
        out.data_ptr(),
    )
    return out


def reference_rope(heads: torch.Tensor, positions: torch.Tensor, tables: RopeTables) -> torch.Tensor:
    """Plain torch: rotated heads [tokens, heads, head_dim]."""
    cosine = tables.cosines[positions].repeat(1, 2)[:, None]
    sine = tables.sines[positions].repeat(1, 2)[:, None]
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def reference_attention(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    works: NDArray[np.void],
    block_table: NDArray[np.int32],
    shape: Shape,
) -> torch.Tensor:
    """Plain torch, the same arguments and result as `paged_attention`."""
    out = torch.zeros_like(queries)
    heads, dim = shape.query_heads, shape.head_dim
    for work in works:
        begin, count, context = (int(work[name]) for name in ("query_start", "query_tokens", "context_tokens"))
        rows = slice(begin, begin + count)
        slots = _slots(block_table[int(work["slot"])], context, shape.block_tokens)
        query = queries[rows].view(count, heads, dim).transpose(0, 1)
        mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
        attended: Any = torch.nn.functional.scaled_dot_product_attention(
            query[None],
            key_cache[slots].transpose(0, 1)[None],
            value_cache[slots].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        out[rows] = attended[0].transpose(0, 1).reshape(count, heads * dim)
    return out


def _slots(blocks: NDArray[np.int32], context: int, block_tokens: int) -> torch.Tensor:
    positions = np.arange(context)
    return torch.from_numpy(
        blocks[positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
    )
