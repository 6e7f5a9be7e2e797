"""The chain's board: the few words by which the host and the chain's kernels know of each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.cuda.memory import DeviceMemory
from gpu_runtime.scheduler import layout


class Board:
    """layout.ChainBoard in device memory, with the step stamps behind it. Every access is a copy over the bus."""

    def __init__(self) -> None:
        stamps_at = layout.ChainBoard.itemsize
        self._memory = DeviceMemory(stamps_at + layout.STAMPS * layout.StepStamp.itemsize)
        self._stamps_at = stamps_at
        self.set("stamps", self.address + stamps_at)

    @property
    def address(self) -> int:
        """Device address."""
        return self._memory.address

    def set(self, field: str, value: int | NDArray[np.uint64]) -> None:
        """Writes a field, a word or an array of words."""
        self._memory.write(layout.CHAIN_BOARD_OFFSETS[field], np.array(value, np.uint64).reshape(-1))

    def get(self, field: str) -> int:
        """Reads a word."""
        return int(self._memory.read(layout.CHAIN_BOARD_OFFSETS[field], np.uint64, 1)[0])

    def stamps(self) -> NDArray[Any]:
        """layout.StepStamp of the latest finished steps, oldest first."""
        stamps = self._memory.read(self._stamps_at, layout.StepStamp, layout.STAMPS)
        finished: NDArray[Any] = stamps[stamps["tail_end_ns"] != 0]
        return np.sort(finished, order="step")

    def free(self) -> None:
        """Gives the memory back; never while the chain runs."""
        self._memory.free()
