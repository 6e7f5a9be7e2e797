"""How much of a CUDA device's memory is free, asked without making a context on it, which would take some itself."""

from __future__ import annotations

import uuid

from gpu_runtime.cuda.device import first_device
from gpu_runtime.cuda.errors import CudaError, check


def free_bytes() -> int:
    """Free memory of the first CUDA device, whoever has taken the rest, by NVIDIA's management library.

    Raises:
        CudaError: there is no device, or the library does not tell.
    """
    try:
        import pynvml
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(f"the package {error.name} is missing, which --device cuda needs") from error
    first_device()
    number = uuid.UUID(bytes=bytes(check(driver.cuDeviceGetUuid(check(driver.cuDeviceGet(0)))).bytes))
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(_handle(pynvml, number)).free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise CudaError(f"the management library does not tell how much memory is free ({error})") from error


def _handle(pynvml: object, number: uuid.UUID) -> object:
    """Of a whole device or of a part of one (MIG), which the library tells apart by the name."""
    by_name = pynvml.nvmlDeviceGetHandleByUUID  # type: ignore[attr-defined]
    try:
        return by_name(f"GPU-{number}")
    except pynvml.NVMLError_NotFound:  # type: ignore[attr-defined]
        return by_name(f"MIG-{number}")
