"""Where CUDA's headers and its device runtime library lie: in the pip packages, or in a toolkit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpu_runtime.cuda.errors import CudaError


def header_folder() -> Path:
    """The folder of `cuda_runtime.h`.

    Raises:
        CudaError: there is none.
    """
    return _find("include/cuda_runtime.h", "nvidia-cuda-runtime").parent


def device_runtime_library() -> Path:
    """`libcudadevrt.a`, which launches graphs from the device.

    Raises:
        CudaError: there is none.
    """
    for folder in ("lib", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        for root in _roots():
            if (path := root / folder / "libcudadevrt.a").is_file():
                return path
    raise CudaError("libcudadevrt.a is missing; the pip package nvidia-cuda-runtime has it")


def _find(relative: str, package: str) -> Path:
    for root in _roots():
        if (root / relative).is_file():
            return root / relative
    raise CudaError(f"{relative} is missing; the pip package {package} has it")


def _roots() -> Iterator[Path]:
    """Pip's packages first: they fit the NVRTC that comes with them."""
    try:
        import nvidia
    except ImportError:
        pass
    else:
        for folder in map(Path, nvidia.__path__):
            yield folder / "cu13"
            yield folder / "cuda_runtime"
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home)
    yield Path("/usr/local/cuda")
