"""Root-mean-square norms on the GPU (Triton), with plain-torch references.

Rounded as transformers does it: the mean and the scaling in float32, then to the model's type, then times the weight.
A row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["source_rows"])
def _norm_kernel(
    source: tl.tensor,
    index: tl.tensor,
    index_stride: tl.tensor,
    source_rows: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
) -> None:
    """One program a row of `out`."""
    if PROGRAMMATIC:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    dtype = out.dtype.element_ty
    source_row = row
    if INDEXED:
        source_row = tl.load(index + row * index_stride).to(tl.int64)
        source_row = tl.minimum(tl.maximum(source_row, 0), source_rows - 1)
    scales = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if PROGRAMMATIC:
        gdc_wait()  # all before this line was there before the step began
    at = source + source_row * size + columns
    inputs = tl.load(at, mask=mask, other=0.0)
    wide = inputs.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
    normed = (wide * scale).to(dtype).to(tl.float32) * scales
    tl.store(out + row * size + columns, normed.to(dtype), mask=mask)


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, programmatic: bool = False) -> torch.Tensor:
    """inputs [rows, size] and weight [size] of one type → [rows, size].

    Args:
        programmatic: start beside the kernel in front, whose results are awaited (programmatic dependent launch), and
            let the next one start; the same for the functions below.
    """
    return _launch(inputs, None, weight, epsilon, programmatic)


def gather_norm(
    inputs: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, programmatic: bool = False
) -> torch.Tensor:
    """Norms inputs[rows] → [len(rows), size]; indexes out of range go to the nearest.

    `rows` is int32 of any stride, and there before the step begins.
    """
    return _launch(inputs, rows, weight, epsilon, programmatic)


def _launch(
    source: torch.Tensor,
    index: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    programmatic: bool,
) -> torch.Tensor:
    size = source.shape[1]
    out = source.new_empty(len(source if index is None else index), size)
    block = triton.next_power_of_2(size)
    _norm_kernel[(len(out),)](
        source,
        index,
        1 if index is None else index.stride(0),
        len(source),
        weight,
        epsilon,
        out,
        size,
        INDEXED=index is not None,
        BLOCK=block,
        PROGRAMMATIC=programmatic,
        num_warps=4 if block <= 2048 else 8,
        launch_pdl=programmatic,
    )
    return out


def reference_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Plain torch: inputs [..., size] normed over the last dimension."""
    wide = inputs.float()
    scaled = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return weight * scaled.to(inputs.dtype)
