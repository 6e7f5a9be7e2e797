"""The chain's own kernels (`chain.cu`), bound to one scheduler and board."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu_runtime.chain.board import Board
from gpu_runtime.chain.device_scheduler import DeviceScheduler
from gpu_runtime.cuda.memory import void_pointer
from gpu_runtime.cuda.module import CudaModule, Kernel

_THREADS = 256
_TAIL_THREADS = 320


class ChainKernels:
    """Launches them on the current stream, or records them while it captures.

    Args:
        launch_graphs: the scheduler launches the next step from the device.
    """

    def __init__(self, scheduler: DeviceScheduler, board: Board, launch_graphs: bool) -> None:
        module = CudaModule.build(Path(__file__).with_name("chain.cu"), device_runtime=launch_graphs)
        self._begin, self._pull, self._foresee, self._poll, self._tail = (
            module.kernel(f"blink_{name}") for name in ("begin", "pull", "foresee", "poll", "tail")
        )
        self._state, self._board = void_pointer(scheduler.state_address), void_pointer(board.address)

    def begin(self) -> None:
        """Notes the time; tells local front ends what the scheduler published."""
        self._launch(self._begin, _THREADS, [self._state, self._board])

    def pull(self) -> None:
        """Takes over what local front ends wrote."""
        self._launch(self._pull, _THREADS, [self._state, self._board])

    def foresee(self) -> None:
        """Works out what can be known of the next step before this one's tokens are; when the layers have ended."""
        self._launch(self._foresee, _TAIL_THREADS, [self._state])

    def poll(self) -> None:
        """Waits for news."""
        self._launch(self._poll, 1, [self._state, self._board])

    def tail(self) -> None:
        """The scheduler; launches the next graph."""
        self._launch(self._tail, _TAIL_THREADS, [self._state, self._board], programmatic=True)

    @staticmethod
    def _launch(kernel: Kernel, threads: int, args: list[Any], programmatic: bool = False) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(stream, (1, 1, 1), threads, args, programmatic=programmatic)
