"""Descriptions of matrices for the copy engine of Hopper GPUs (CUtensorMap), as kernels take them by value."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from gpu_runtime.cuda.errors import CudaError

BOX_COLUMNS = 64
"""Of bf16, the longest rows (128 bytes) that can be spread over the banks of shared memory."""

_ALIGNMENT = 64
# cuda.h: CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_L2_256B, _FLOAT_OOB_FILL_NONE
_BFLOAT16, _INTERLEAVE, _SWIZZLE, _L2_PROMOTION, _FILL = 9, 0, 3, 3, 0


class TensorMap(ctypes.Structure):
    """A CUtensorMap."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(matrix: torch.Tensor, rows: int) -> TensorMap:
    """Describes boxes of 64 columns and `rows` rows (1 to 256) of a contiguous bf16 matrix; outside of it are zeros.

    The 16-byte groups of a box's rows are exchanged in shared memory: see `box_copy` in skinny_ops.cuh.

    Raises:
        CudaError: the driver refuses the shape or the address (a multiple of 16, as a row's bytes are).
    """
    height, width = matrix.shape
    # The driver wants an address that is a multiple of 64, which neither ctypes nor cuda-bindings sees to.
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _ALIGNMENT)
    address = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    sizes, strides = (ctypes.c_uint64 * 2)(width, height), (ctypes.c_uint64 * 1)(width * matrix.element_size())
    box, steps = (ctypes.c_uint32 * 2)(BOX_COLUMNS, rows), (ctypes.c_uint32 * 2)(1, 1)
    pointers = (sizes, strides, box, steps)
    status = _encode()(address, _BFLOAT16, 2, matrix.data_ptr(), *pointers, _INTERLEAVE, _SWIZZLE, _L2_PROMOTION, _FILL)
    if status:
        raise CudaError(f"no tensor map for boxes of {rows} rows of {tuple(matrix.shape)}: CUDA error {status}")
    return TensorMap.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(TensorMap)))


@cache
def _encode() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, ctypes.c_uint32, *[pointer] * 5, *[number] * 4]
    function.restype = number
    return function
