"""Device memory of our own, outside torch's allocator, and host memory that the device maps."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_runtime.cuda.errors import CudaError, check

REGISTRATION_ALIGNMENT = 2 << 20
"""Physical pages of device memory: what is registered with a network card should begin on one and fill it."""


class DeviceMemory:
    """Zeroed device memory in one piece, aligned for registration, of the current context.

    Copies go over a stream of their own, so that they neither wait for a running chain nor hold it up.
    """

    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        pages = -(-size // REGISTRATION_ALIGNMENT)
        self.size = pages * REGISTRATION_ALIGNMENT
        status, pointer = driver.cuMemAlloc(self.size + REGISTRATION_ALIGNMENT)
        if int(status) != 0:
            raise CudaError(f"{size / 2**20:.0f} MiB of device memory cannot be had: {status.name}")
        self._pointer = pointer
        self.address = -(-int(pointer) // REGISTRATION_ALIGNMENT) * REGISTRATION_ALIGNMENT
        self._stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        check(driver.cuMemsetD8Async(self.address, 0, self.size, self._stream))
        check(driver.cuStreamSynchronize(self._stream))

    def write(self, offset: int, content: NDArray[Any]) -> None:
        """Copies an array in and waits for it.

        Raises:
            CudaError: it does not lie within.
        """
        from cuda.bindings import driver

        source = np.ascontiguousarray(content)
        self._check(offset, source.nbytes)
        check(driver.cuMemcpyHtoDAsync(self.address + offset, source.ctypes.data, source.nbytes, self._stream))
        check(driver.cuStreamSynchronize(self._stream))

    def read(self, offset: int, dtype: Any, count: int) -> NDArray[Any]:
        """A copy of `count` items (errors: see `write`)."""
        from cuda.bindings import driver

        target = np.empty(count, dtype)
        self._check(offset, target.nbytes)
        check(driver.cuMemcpyDtoHAsync(target.ctypes.data, self.address + offset, target.nbytes, self._stream))
        check(driver.cuStreamSynchronize(self._stream))
        return target

    def tensor(self, address: int, shape: tuple[int, ...], dtype: str = "<i4") -> torch.Tensor:
        """A tensor over a part of the memory, by its device address; keeps nothing alive."""
        self._check(address - self.address, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return torch.as_tensor(_ArrayInterface(address, shape, dtype), device="cuda")

    def free(self) -> None:
        """Gives it back; waits for everything that runs on the device, so never while a chain runs."""
        from cuda.bindings import driver

        check(driver.cuMemFree(self._pointer))
        check(driver.cuStreamDestroy(self._stream))

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or offset + size > self.size:
            raise CudaError(f"{size} bytes at {offset} do not lie within {self.size} bytes of device memory")


class _ArrayInterface:
    """Device memory as torch takes it (the CUDA Array Interface, version 3)."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class MappedMemory:
    """Host memory that the device reads and writes in place.

    Args:
        region: page-aligned bytes; must stay mapped until `close`.
    """

    def __init__(self, region: NDArray[np.uint8]) -> None:
        from cuda.bindings import driver

        self._region = region
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_PORTABLE
        check(driver.cuMemHostRegister(region.ctypes.data, region.nbytes, flags))
        self.address = int(check(driver.cuMemHostGetDevicePointer(region.ctypes.data, 0)))

    def close(self) -> None:
        """Ends the mapping; never while a chain runs."""
        from cuda.bindings import driver

        check(driver.cuMemHostUnregister(self._region.ctypes.data))


def void_pointer(address: int) -> ctypes.c_void_p:
    """A kernel argument."""
    return ctypes.c_void_p(address)
