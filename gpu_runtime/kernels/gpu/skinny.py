"""Products of few tokens with a bf16 matrix at the speed of reading it once (`skinny.cu`), with plain-torch references.

Each function has what surrounds the product fused in: the norm in front, the residual or the activation behind. They
are launched with programmatic dependent launch. A token's result has the same bits in whatever company and by
whichever of the kernels it is computed; sums are float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gpu_runtime.cuda.errors import check
from gpu_runtime.cuda.module import CudaModule, Kernel
from gpu_runtime.kernels.gpu.tensor_map import BOX_COLUMNS, tensor_map

MAX_TOKENS = 64

AT_START = 1 << 20
"""The next kernel may start as soon as this one has (`python -m tests.bench.gpu_skinny` compares later starts)."""

_THREADS = 192
_CHUNK_COLUMNS = 256
_PIECE_ROWS = 32
_TOKEN_PITCH = 2 * _CHUNK_COLUMNS + 16
# Up to so many tokens are copied one by one: fewer where a chunk of them is for one piece alone.
_SINGLY = {"project": 8, "project_float": 16, "residual": 8, "gated": 8}
_RING_OFFSET = 6 << 10
_MAX_STAGES = 16
# Of a multiprocessor's 228 KiB, each block takes 1 KiB more than it asks for; two blocks of the smaller kernels fit.
_HALF_SHARED_BYTES = (228 << 10) // 2 - 1024
_WHOLE_SHARED_BYTES = 227 << 10
# By the tokens that a kernel takes: the pieces of rows that it multiplies with one piece of the tokens.
_PIECES = {8: (1, 2, 4), 16: (1, 2, 4), 32: (1, 2), 64: (1,)}


@dataclass(frozen=True)
class Weighted:
    """A norm in front of a product: weight [columns] in bf16."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class Schedule:
    """How a kernel is cut up and how far ahead it reads.

    Attributes:
        tokens: the kernel's limit: 8, 16, 32 or 64.
        pieces: pieces of rows in a tile.
        tiles: of each block, one after the other.
        piece_units: columns of the result in a piece, in some of the pieces one more.
        piece_rows: rows of memory that a piece takes, gated twice.
        w_stages, x_stages: pieces of the matrix and of the tokens that fit in shared memory.
    """

    blocks: int
    tokens: int
    pieces: int
    tiles: int
    piece_units: int
    piece_rows: int
    w_stages: int
    x_stages: int
    shared_bytes: int


def supports(tokens: int, columns: int, units: int, dtype: torch.dtype) -> bool:
    """Whether the kernels here take `tokens` rows of `columns` numbers and give `units` (for each of them)."""
    return (
        dtype == torch.bfloat16
        and 0 < tokens <= MAX_TOKENS
        and columns > 0
        and columns % BOX_COLUMNS == 0
        and units > 0
    )


@cache
def schedule(kind: str, tokens: int, columns: int, units: int, blocks: int) -> Schedule:
    """The kernel and its cut for a problem, on a device with so many multiprocessors.

    Raises:
        ValueError: the kernels do not take this problem.
    """
    if not supports(tokens, columns, units, torch.bfloat16):
        raise ValueError(f"no kernel for {tokens} tokens of {columns} numbers times {units}")
    blocks = min(blocks, units)
    limit = next(limit for limit in _PIECES if tokens <= limit)
    unit_rows = 2 if kind == "gated" else 1
    most, room = -(-units // blocks), _PIECE_ROWS // unit_rows
    pieces = next((count for count in _PIECES[limit] if count * room >= most), _PIECES[limit][-1])
    tiles = -(-most // (room * pieces))
    piece_units, more = divmod(units, blocks * tiles * pieces)
    piece_rows = -(-(piece_units + (more > 0)) // 8) * 8
    budget = (_WHOLE_SHARED_BYTES if limit == MAX_TOKENS else _HALF_SHARED_BYTES) - _RING_OFFSET
    x_bytes, w_bytes = _x_stage_bytes(kind, tokens), piece_rows * unit_rows * 2 * _CHUNK_COLUMNS
    steps = tiles * -(-columns // _CHUNK_COLUMNS)
    x_stages = min(max(2, budget // 4 // x_bytes), 8, max(2, steps))
    w_stages = min((budget - x_stages * x_bytes) // w_bytes, _MAX_STAGES, steps * pieces)
    shared = _RING_OFFSET + x_stages * x_bytes + w_stages * w_bytes
    return Schedule(blocks, limit, pieces, tiles, piece_units, piece_rows, w_stages, x_stages, shared)


def _x_stage_bytes(kind: str, tokens: int) -> int:
    """Bytes of 256 columns of the tokens, and of the norm's weight, in shared memory."""
    normed = kind != "residual"
    if tokens > _SINGLY[kind]:
        return _boxed(tokens) * 2 * _CHUNK_COLUMNS + 1024 * normed
    return (tokens + normed) * _TOKEN_PITCH


def _boxed(tokens: int) -> int:
    return -(-tokens // 8) * 8


class SkinnyKernels:
    """The products, launched on torch's current stream; nothing here depends on the values of any tensor.

    Args:
        programmatic: a kernel may start, and ask for its matrix, while the kernel in front still runs.
        early: pieces of the matrix that a kernel still has to ask for when the next one may start.
    """

    def __init__(self, programmatic: bool = True, early: int = AT_START) -> None:
        self._programmatic, self._early = programmatic, early

    def project(
        self,
        inputs: torch.Tensor,
        norm: Weighted,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """Norms inputs [tokens, columns], or inputs[rows], times weight [units, columns]ᵀ plus bias → [tokens, units].

        Args:
            rows: int32 of any stride; indexes out of range go to the nearest.
            dtype: of the result, bfloat16 or float32.
        """
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"results are bfloat16 or float32, not {dtype}")
        out = torch.empty(len(inputs if rows is None else rows), len(weight), dtype=dtype, device=inputs.device)
        kind = "project_float" if dtype == torch.float32 else "project"
        if rows is not None and len(rows) > _SINGLY[kind]:
            inputs, rows = inputs.index_select(0, rows.clamp(0, len(inputs) - 1)), None
        self._launch(kind, inputs, weight, out, norm=norm, bias=bias, rows=rows)
        return out

    def project_onto(
        self, residual: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Adds inputs [tokens, columns] · weight [units, columns]ᵀ + bias to residual [tokens, units], in place."""
        self._launch("residual", inputs, weight, residual, bias=bias)

    def project_gated(
        self, inputs: torch.Tensor, norm: Weighted, gate_up: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """silu(gate) · up of the normed inputs → [tokens, units]; gate_up [2 · units, columns], bias [2 · units].

        Rows of the gate come before those of the other half.
        """
        out = torch.empty(len(inputs), len(gate_up) // 2, dtype=torch.bfloat16, device=inputs.device)
        self._launch("gated", inputs, gate_up, out, norm=norm, bias=bias)
        return out

    def _launch(
        self,
        kind: str,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        norm: Weighted | None = None,
        bias: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        _check(kind, inputs, weight, out, norm, bias, rows)
        (tokens, units), columns = out.shape, inputs.shape[1]
        cut = schedule(kind, tokens, columns, units, _multiprocessors(inputs.device))
        arrays = (inputs, None if norm is None else norm.weight, bias, out, rows)
        sizes = (0 if rows is None else rows.stride(0), len(inputs), tokens, columns, units)
        arguments: list[Any] = [
            tensor_map(weight, cut.piece_units),
            tensor_map(weight, cut.piece_units + 1),
            tensor_map(inputs[:tokens], _boxed(tokens)),
            *(ctypes.c_void_p(None if array is None else array.data_ptr()) for array in arrays),
            *(ctypes.c_int32(size) for size in sizes),
            ctypes.c_float(0.0 if norm is None else norm.epsilon),
            *(ctypes.c_int32(size) for size in (cut.tiles, cut.piece_units, cut.w_stages, cut.x_stages, self._early)),
        ]
        _kernel(kind, cut.tokens, cut.pieces).launch(
            torch.cuda.current_stream().cuda_stream,
            grid=(cut.blocks, 1, 1),
            block=_THREADS,
            args=arguments,
            shared_bytes=cut.shared_bytes,
            programmatic=self._programmatic,
        )


@cache
def _module() -> CudaModule:
    return CudaModule.build(Path(__file__).with_suffix(".cu"))


@cache
def _kernel(kind: str, tokens: int, pieces: int) -> Kernel:
    kernel = _module().kernel(f"skinny_{kind}_{tokens}x{pieces}")
    kernel.allow_shared_bytes(_WHOLE_SHARED_BYTES if tokens == MAX_TOKENS else _HALF_SHARED_BYTES)
    _take_shared_memory(kernel)
    return kernel


def _take_shared_memory(kernel: Kernel) -> None:
    """All of a multiprocessor's cache as shared memory: kernels overlap only where they agree on the split."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(driver.cuFuncSetAttribute(kernel.function, attribute, 100))


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(
    kind: str,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm: Weighted | None,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
) -> None:
    (tokens, units), columns = out.shape, inputs.shape[1]
    _check_array("matrix", weight, (units * (2 if kind == "gated" else 1), columns))
    _check_array("inputs", inputs, (tokens if rows is None else len(inputs), columns))
    if norm is not None:
        _check_array("norm", norm.weight, (columns,))
    if bias is not None:
        _check_array("bias", bias, (len(weight),))
    if not out.is_contiguous() or (rows is not None and rows.dtype != torch.int32):
        raise ValueError("a result is contiguous, and rows are int32")


def _check_array(name: str, array: torch.Tensor, shape: tuple[int, ...]) -> None:
    """The copy engine needs addresses that are multiples of 16."""
    if array.shape != shape or array.dtype != torch.bfloat16 or not array.is_contiguous() or array.data_ptr() % 16:
        raise ValueError(f"the {name} {tuple(array.shape)} of a product must be {shape}, bfloat16 and contiguous")


def reference_normed(inputs: torch.Tensor, norm: Weighted) -> torch.Tensor:
    """Plain torch, in float64 but for the one rounding that the kernels make: of inputs · weight to bf16."""
    scale = (inputs.double().square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
    return (inputs * norm.weight).double() * scale


def reference_project(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: Weighted | None
) -> torch.Tensor:
    """Plain torch, in float64; without a norm, what is added to a residual."""
    product = (inputs.double() if norm is None else reference_normed(inputs, norm)) @ weight.double().T
    return product if bias is None else product + bias.double()


def reference_gated(
    inputs: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None, norm: Weighted
) -> torch.Tensor:
    """Plain torch, in float64."""
    gate, up = reference_project(inputs, gate_up, bias, norm).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up
