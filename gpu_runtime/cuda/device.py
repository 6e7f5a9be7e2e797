"""What a CUDA device is, asked without making a context on it."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_runtime.cuda.errors import CudaError, check


@dataclass(frozen=True)
class Device:
    """The first CUDA device."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """Compute capability: (9, 0) is Hopper."""


def first_device() -> Device:
    """Asks the driver.

    Raises:
        CudaError: there is no driver, no device, or no Python binding of CUDA.
    """
    try:
        from cuda.bindings import driver

        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        name = check(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
        memory = int(check(driver.cuDeviceTotalMem(device)))
        attributes = driver.CUdevice_attribute
        major = check(driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        minor = check(driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        return Device(name, memory, (int(major), int(minor)))
    except ImportError as error:
        raise CudaError("the package cuda-bindings is missing, which --device cuda needs") from error
    except CudaError as error:
        raise CudaError(f"no CUDA device can be used ({error})") from error
    except RuntimeError as error:
        raise CudaError(f"no CUDA driver is there ({error})") from error
