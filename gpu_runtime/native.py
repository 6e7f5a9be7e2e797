"""Finds the C libraries that the package build makes."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec


def load_library(name: str) -> ctypes.CDLL:
    """Loads `gpu_runtime.<name>`, a library with plain C functions.

    Raises:
        ImportError: it was not built.
    """
    spec = find_spec(f"gpu_runtime.{name}")
    if spec is None or spec.origin is None:
        raise ImportError(f"gpu_runtime.{name} is not built; install the package (pip install -e .)")
    return ctypes.CDLL(spec.origin)
