"""What `--device cuda` needs of the machine, asked before anything is loaded."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from gpu_runtime.config import ConfigError
from gpu_runtime.cuda.device import first_device
from gpu_runtime.cuda.errors import CudaError, check
from gpu_runtime.cuda.toolkit import device_runtime_library, header_folder
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.gpu_memory import check_device
from gpu_runtime.registration.ways import Wish

LEAST_CAPABILITY = (9, 0)
"""Hopper: kernels wait for each other by instructions that came with it (`griddepcontrol`)."""

_PACKAGES = {"torch": "torch", "triton": "triton", "cuda.bindings": "cuda-bindings", "pynvml": "nvidia-ml-py"}


def require_device(device: str, rdma: Wish | None = None) -> None:
    """Checks that a runtime can start on this machine; "cpu" needs nothing.

    Args:
        rdma: given where network cards shall reach the device's memory.

    Raises:
        ConfigError: a package, the driver or a device that is new enough is missing.
    """
    if device != "cuda":
        return
    missing = [package for module, package in _PACKAGES.items() if not _is_there(module)]
    if missing:
        raise ConfigError(f"--device cuda needs what is not installed: {', '.join(missing)} (extras gpu and cuda)")
    if (version := metadata.version("torch")).endswith("+cpu"):
        raise ConfigError(f"--device cuda: the installed torch {version} was built for the CPU alone")
    try:
        header_folder()
        device_runtime_library()
        found = first_device()
    except CudaError as error:
        raise ConfigError(f"--device cuda: {error}") from error
    if found.capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, version)) for version in (found.capability, LEAST_CAPABILITY))
        raise ConfigError(f"--device cuda: {found.name} has compute capability {have}, at least {least} is needed")
    if rdma is not None:
        _require_rdma(rdma)


def _require_rdma(wish: Wish) -> None:
    """The device's part of it; see `try_adapters` for the adapters'."""
    from cuda.bindings import driver

    try:
        check_device(driver, check(driver.cuDeviceGet(0)), wish)
    except (CudaError, RegistrationError) as error:
        raise ConfigError(f"--device cuda with RDMA: {error}") from error


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
