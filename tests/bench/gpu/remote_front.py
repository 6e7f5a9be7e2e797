"""A front end that reaches an arena in device memory by copies of its own, as one does by RDMA: it rings no bell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.shared_arena import SharedArena
from tests.bench.gpu.front import Front

Put = Callable[[int, bytes], None]
"""Writes into the inbound region: offset, bytes. They are there when it returns."""
Get = Callable[[int, int], bytes]
"""Reads from the outbound region: offset, size."""


class RemoteFront(Front):
    """See `Front`. `shared` is looked at for its sizes only."""

    def __init__(
        self, shared: SharedArena, put: Put, get: Get, channel: int = 0, over: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(shared, channel, over)
        self._put, self._get = put, get

    def write(self, offset: int, payload: bytes) -> None:
        """Bytes into the inbound region."""
        self._put(offset, payload)

    def commit(self, offset: int, word: int) -> None:
        """A word into the inbound region, after everything written before."""
        self._put(offset, word.to_bytes(8, "little"))

    def _copy(self, into: NDArray[Any], region: NDArray[np.uint8], offset: int) -> None:
        if into.nbytes:
            into.view(np.uint8).reshape(-1)[:] = np.frombuffer(self._get(offset, into.nbytes), np.uint8)
