"""One error for everything that CUDA's libraries refuse."""

from __future__ import annotations

from typing import Any


class CudaError(RuntimeError):
    """A CUDA library refused a call, or a part of CUDA is missing."""


def check(result: tuple[Any, ...]) -> Any:
    """The values of a cuda-bindings call: None, one value or a tuple.

    Raises:
        CudaError: the call's status is not success.
    """
    status, *values = result
    if int(status) != 0:
        raise CudaError(f"{type(status).__name__}: {status.name} ({int(status)})")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
