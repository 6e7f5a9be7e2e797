"""The gated activation between a layer's matrices on the GPU (Triton), with its plain-torch reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
) -> None:
    """One program for BLOCK columns of a row."""
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=mask, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out + row * inner + columns, gated.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, programmatic: bool = False) -> torch.Tensor:
    """gate_up [rows, 2 · inner], gates before ups → silu(gate) · up [rows, inner], rounded once.

    Args:
        programmatic: as for `rms_norm`.
    """
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    _silu_mul_kernel[(rows, triton.cdiv(inner, _BLOCK))](
        gate_up, out, inner, BLOCK=_BLOCK, PROGRAMMATIC=programmatic, num_warps=4, launch_pdl=programmatic
    )
    return out


def reference_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
