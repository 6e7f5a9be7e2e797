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
    """Launches them on the current stream, or records them while it captures."""

    def __init__(self, scheduler: DeviceScheduler, board: Board) -> None:
        module = CudaModule.build(Path(__file__).with_name("chain.cu"), device_runtime=True)
        self._begin, self._pull, self._poll, self._tail = (
            module.kernel(f"blink_{name}") for name in ("begin", "pull", "poll", "tail")
        )
        self._tail.allow_shared_bytes(scheduler.shared_bytes)
        self._shared_bytes = scheduler.shared_bytes
        self._state, self._board = void_pointer(scheduler.state_address), void_pointer(board.address)
        self._cold, self._rehearsal_cold = scheduler.cold, scheduler.rehearsal_cold

    def begin(self) -> None:
        """Notes the time; tells local front ends what the scheduler published."""
        self._launch(self._begin, _THREADS, [self._state, self._board])

    def pull(self) -> None:
        """Takes over what local front ends wrote."""
        self._launch(self._pull, _THREADS, [self._state, self._board])

    def poll(self) -> None:
        """Waits for news."""
        self._launch(self._poll, 1, [self._state, self._board])

    def tail(self) -> None:
        """The scheduler; launches the next graph."""
        arguments = [self._cold, self._board, self._rehearsal_cold]
        self._launch(self._tail, _TAIL_THREADS, arguments, self._shared_bytes, programmatic=True)

    @staticmethod
    def _launch(
        kernel: Kernel, threads: int, args: list[Any], shared_bytes: int = 0, programmatic: bool = False
    ) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(stream, (1, 1, 1), threads, args, shared_bytes, programmatic)
