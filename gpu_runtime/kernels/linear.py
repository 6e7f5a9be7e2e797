"""Products with the weights of a layer on the CPU (`linear.cpp`): a row's result does not depend on the other rows.

MKL, which torch uses, sums products of up to 3 rows in another order than larger ones (torch 2.13, all six shapes of
the default model tried with 1 to 256 rows: equal bits from 4 rows on, other bits below), so a sequence alone and in
company could part ways. Hence a kernel of our own, and the faster one as well. Times in ms on 2 cores of an EPYC 9004
(AVX-512), own / torch (`python -m tests.bench.linear`):

| in → out     | 1 row       | 8 rows      | 128 rows    |
|--------------|-------------|-------------|-------------|
| 576 → 1536   | 0.10 / 0.30 | 0.15 / 0.34 | 1.29 / 1.41 |
| 1536 → 576   | 0.10 / 0.22 | 0.14 / 0.29 | 1.34 / 1.35 |
| 576 → 49,152 | 2.7 / 9.3   | 4.4 / 15.8  | 41 / 57     |
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from gpu_runtime.native import load_library

_STORE, _ADD, _GATE = 0, 1, 2


class _Matrix(ctypes.Structure):
    """Mirrors `Matrix` in linear.cpp."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
    ]


class _Norm(ctypes.Structure):
    """Mirrors `Norm` in linear.cpp."""

    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


@dataclass(frozen=True)
class Linear:
    """A matrix [out, in] and an optional bias [out]; float32, contiguous."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm: weight [in], float32, contiguous."""

    weight: torch.Tensor
    epsilon: float


@cache
def _library() -> ctypes.CDLL:
    library = load_library("_host_kernels")
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.blink_project.argtypes = [pointer, size, size, pointer, pointer, pointer, size, size]
    library.blink_project.restype = None
    library.blink_rms_norm.argtypes = [pointer, size, size, pointer, pointer]
    library.blink_rms_norm.restype = None
    return library


def project(inputs: torch.Tensor, linears: Sequence[Linear], norm: Norm | None = None) -> list[torch.Tensor]:
    """inputs [rows, in] · weightᵀ + bias → [rows, out] for each of `linears`; the inputs are normed first by `norm`."""
    outs = [torch.empty(inputs.shape[0], linear.weight.shape[0]) for linear in linears]
    _project(inputs, linears, outs, norm, _STORE)
    return outs


def project_onto(residual: torch.Tensor, inputs: torch.Tensor, linear: Linear) -> None:
    """Adds inputs [rows, in] · weightᵀ + bias to residual [rows, out], in place."""
    _project(inputs, [linear], [residual], None, _ADD)


def project_gated(inputs: torch.Tensor, gate: Linear, up: Linear, norm: Norm) -> torch.Tensor:
    """silu(gate(x)) * up(x) → [rows, out], for the normed inputs x."""
    outs = [torch.empty(inputs.shape[0], gate.weight.shape[0]) for _ in range(2)]
    _project(inputs, [gate, up], outs, norm, _GATE)
    return outs[0]


def rms_norm(inputs: torch.Tensor, norm: Norm) -> torch.Tensor:
    """inputs [..., size], normed over the last dimension."""
    out = torch.empty_like(inputs)
    size = inputs.shape[-1]
    native = _Norm(norm.weight.data_ptr(), norm.epsilon)
    _library().blink_rms_norm(inputs.data_ptr(), inputs.numel() // size, size, ctypes.byref(native), out.data_ptr())
    return out


def _project(
    inputs: torch.Tensor, linears: Sequence[Linear], outs: list[torch.Tensor], norm: Norm | None, mode: int
) -> None:
    rows, inner = inputs.shape
    if not rows:
        return
    matrices = (_Matrix * len(linears))(*map(_matrix, linears, outs))
    normed = None if norm is None else torch.empty_like(inputs)
    native = None if norm is None else ctypes.byref(_Norm(norm.weight.data_ptr(), norm.epsilon))
    _library().blink_project(inputs.data_ptr(), rows, inner, native, _address(normed), matrices, len(linears), mode)


def _matrix(linear: Linear, out: torch.Tensor) -> _Matrix:
    return _Matrix(linear.weight.data_ptr(), _address(linear.bias), out.data_ptr(), out.shape[1])


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def reference_linear(inputs: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Plain torch, in float64."""
    product = inputs.double() @ linear.weight.double().T
    return product if linear.bias is None else product + linear.bias.double()


def reference_rms_norm(inputs: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Plain torch, in float64."""
    wide = inputs.double()
    return norm.weight.double() * wide * (wide.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()


def reference_gated(inputs: torch.Tensor, gate: Linear, up: Linear, norm: Norm) -> torch.Tensor:
    """Plain torch, in float64."""
    normed = reference_rms_norm(inputs, norm)
    return torch.nn.functional.silu(reference_linear(normed, gate)) * reference_linear(normed, up)
