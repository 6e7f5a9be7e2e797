"""Matrix product with the weights of a layer on the CPU (`linear.cpp`): a row's result does not depend on the others.

MKL, which torch uses, sums products of up to 3 rows in another order than larger ones, so that a sequence alone and
in company could part ways. Own kernel instead, and the faster one as well: on 2 cores of an AVX-512 machine, ms for
the default model's 576 → 1536 projection, own / torch 2.13: 1 row 0.16 / 0.30, 8 rows 0.23 / 0.41, 128 rows
1.42 / 1.48; for its head (49,152 columns): 4.1 / 9.3, 7.2 / 14.9, 45 / 66 (`python -m tests.bench.linear`).
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from gpu_runtime.native import load_library


@cache
def _library() -> ctypes.CDLL:
    library = load_library("_host_kernels")
    library.blink_linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
    library.blink_linear.restype = None
    return library


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """inputs [rows, inner] · weight [columns, inner]ᵀ + bias [columns] → [rows, columns]; float32, contiguous."""
    rows, inner = inputs.shape
    out = torch.empty(rows, weight.shape[0])
    address = None if bias is None else bias.data_ptr()
    _library().blink_linear(inputs.data_ptr(), weight.data_ptr(), address, out.data_ptr(), rows, weight.shape[0], inner)
    return out


def reference_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Plain torch, in float64."""
    product = inputs.double() @ weight.double().T
    return product if bias is None else product + bias.double()
