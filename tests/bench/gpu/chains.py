"""A chain in this process with an arena of its own, on the CPU (the soft GPU, in a thread) or on a CUDA device."""

from __future__ import annotations

import gc
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.chain.soft import run_chain
from gpu_runtime.config import ModelLimits, RuntimeConfig, longest_sequence, make_config, scheduler_config, window_of
from gpu_runtime.mailbox import Mailbox
from gpu_runtime.model.source import ModelFolder, open_folder
from gpu_runtime.scheduler import layout
from gpu_runtime.scheduler.host import HostScheduler, Plan
from gpu_runtime.shared_arena import ArenaLimits, SharedArena
from tests.bench.gpu.front import Front

STOP_SECONDS = 20.0


class ChainEnded(RuntimeError):
    """The chain ended, or did not, against expectation."""


class SoftChain:
    """The soft GPU with the interface of `gpu_runtime.chain.cuda_chain.CudaChain`, in a thread."""

    graph_bytes = 0

    def __init__(self, folder: ModelFolder, config: RuntimeConfig, limits: ModelLimits, shared: SharedArena) -> None:
        from gpu_runtime.chain.soft_step import SoftStep

        began = time.monotonic()
        self._mailbox = Mailbox()
        made = scheduler_config(config, limits)
        self._runner = _Stamped(SoftStep(folder, config.threads, made, lambda done: None))
        self._scheduler = HostScheduler(made, shared.inbound, shared.outbound)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.start_seconds = time.monotonic() - began

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def command(self, command: layout.Command) -> None:
        """Tells the scheduler."""
        self._mailbox.command = command

    def ended(self) -> bool:
        """The thread is over.

        Raises:
            ChainEnded: by an error.
        """
        if self._error is not None:
            raise ChainEnded(repr(self._error))
        return not self._thread.is_alive()

    def stamps(self) -> NDArray[np.void]:
        """layout.StepStamp of the latest finished steps, oldest first."""
        return self._runner.stamps()

    def close(self) -> None:
        """Stops."""
        self.command(layout.Command.STOP)
        self._thread.join(STOP_SECONDS)
        self._scheduler.close()

    def _run(self) -> None:
        try:
            run_chain(self._scheduler, self._runner, self._mailbox)
        except Exception as error:
            self._error = error


class _Stamped:
    """Notes when steps ran. The scheduler's part ends, as seen from here, when the next step begins."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._stamps: list[tuple[int, ...]] = []
        self._open: list[int] | None = None

    def run(self, plan: Plan) -> NDArray[np.int32]:
        """See StepRunner."""
        begin = time.monotonic_ns()
        if self._open is not None:
            self._stamps = [*self._stamps[1 - layout.STAMPS :], tuple(self._open)]
            self._stamps[-1] = (*self._open[:3], begin, *self._open[4:])
        header = plan.header
        facts = [int(header[name]) for name in ("step", "tokens", "decode_works", "bucket")]
        sampled: NDArray[np.int32] = self._runner.run(plan)
        now = time.monotonic_ns()
        self._open = [facts[0], begin, now, now, *facts[1:], 0]
        return sampled

    def stamps(self) -> NDArray[np.void]:
        """Those that are complete."""
        return np.array(self._stamps, layout.StepStamp)


class LocalChain:
    """A running chain and its arena.

    Raises:
        whatever the chain raises when it cannot start; nothing is left then.
    """

    def __init__(self, folder: ModelFolder, config: RuntimeConfig, **options: Any) -> None:
        model = folder.config
        self.config, self.folder = config, folder
        self.limits = ModelLimits(model.vocab_size, model.max_position_embeddings, tuple(folder.eos_token_ids))
        self.window = window_of(config, self.limits)
        longest = longest_sequence(config, self.limits)
        header = ArenaLimits(secrets.randbits(64), 1, model.vocab_size, self.window, longest)
        self.shared = SharedArena.create(config.arena_sizes(), header)
        try:
            self.chain = self._make(options)
        except BaseException:
            self.shared.unlink()
            raise

    def front(self, channel: int = 0) -> Front:
        """A front end that holds a channel."""
        made = Front(self.shared, channel, self.chain.ended)
        made.take()
        return made

    def close(self) -> None:
        """Ends the chain and gives everything back."""
        try:
            self.chain.command(layout.Command.STOP)
            self._wait_end()
        except BaseException:
            self.shared.unlink()  # what still runs, or has failed, keeps its memory
            raise
        self.release()

    def release(self) -> None:
        """Gives back what a chain that has ended, or never launched itself, holds."""
        self.chain.close()
        del self.chain
        self.shared.unlink()
        _free_device_memory(self.config.device)

    def _make(self, options: dict[str, Any]) -> Any:
        if self.config.device == "cpu":
            return SoftChain(self.folder, self.config, self.limits, self.shared)
        from gpu_runtime.chain.cuda_chain import CudaChain

        return CudaChain(self.folder, self.config, self.limits, self.shared, **options)

    def _wait_end(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while not self.chain.ended():
            if time.monotonic() > deadline:
                raise ChainEnded(f"the chain did not end within {STOP_SECONDS:g} s of the stop command")
            time.sleep(0.005)


def _free_device_memory(device: str) -> None:
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


def open_model(path: Path, config: RuntimeConfig) -> ModelFolder:
    """A folder as the configuration needs it: with its weights, or without."""
    return open_folder(path, path.name, weights=not config.random_weights)


@contextmanager
def local_chain(path: Path, device: str, **choices: Any) -> Iterator[LocalChain]:
    """A chain over a folder, started; stopped in the end. `choices` are those of `make_config`."""
    config = make_config(device, **choices)
    made = LocalChain(open_model(path, config), config)
    try:
        made.chain.start()
        yield made
    finally:
        made.close()
