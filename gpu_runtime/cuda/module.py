"""Kernels of ours: compiled (or taken from the cache), loaded into the current context, launched on a stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpu_runtime.cuda.build import compile_kernels
from gpu_runtime.cuda.errors import check

Argument = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_int64 | ctypes.c_uint64 | ctypes.c_float


@cache
def device_architecture() -> str:
    """Architecture of the current device, with the "a" of Hopper and later, whose own instructions we use."""
    from cuda.bindings import driver

    attributes = driver.CUdevice_attribute
    device = check(driver.cuCtxGetDevice())
    major = check(driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = check(driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@dataclass(frozen=True)
class Kernel:
    """A kernel of a loaded module."""

    function: Any

    def allow_shared_bytes(self, count: int) -> None:
        """Raises the limit of dynamic shared memory, needed once for launches with more than 48 KiB."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self.function, attribute, count))

    def launch(
        self,
        stream: int,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
        programmatic: bool = False,
    ) -> None:
        """Launches (or, on a capturing stream, records) the kernel.

        Args:
            args: ctypes values in the order of the kernel's parameters.
            programmatic: may start before the kernel in front has ended (programmatic dependent launch); the kernel
                waits itself, by `griddepcontrol.wait`.

        Raises:
            CudaError: the driver refuses.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(stream)
        if programmatic:
            config.attrs = [_programmatic_attribute()]
            config.numAttrs = 1
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(argument) for argument in args))
        check(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))


@cache
def _programmatic_attribute() -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


class CudaModule:
    """A loaded module; stays loaded for the life of the process."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def build(cls, source: Path, *, device_runtime: bool = False) -> CudaModule:
        """Compiles a `.cu` file for the current device and loads it (arguments and errors: see `compile_kernels`)."""
        from cuda.bindings import driver

        cubin = compile_kernels(source, device_architecture(), device_runtime=device_runtime)
        return cls(check(driver.cuModuleLoadData(cubin)))

    def kernel(self, name: str) -> Kernel:
        """A kernel by its `extern "C"` name."""
        from cuda.bindings import driver

        return Kernel(check(driver.cuModuleGetFunction(self._handle, name.encode())))
