"""The chain on a CUDA device: set up here, then on its own until it is told to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.chain.board import Board
from gpu_runtime.chain.chain_kernels import ChainKernels
from gpu_runtime.chain.cuda_model import build_step
from gpu_runtime.chain.device_scheduler import DeviceArena, DeviceScheduler
from gpu_runtime.chain.graphs import StepGraph, capture
from gpu_runtime.config import ModelLimits, RuntimeConfig, scheduler_config
from gpu_runtime.cuda.errors import CudaError
from gpu_runtime.model.source import ModelFolder
from gpu_runtime.scheduler import layout
from gpu_runtime.shared_arena import SharedArena

Progress = Callable[[int, int], None]

LONGEST_POLL_NS = 20_000_000
"""Longest wait in one poll: leases are checked, and the heartbeat grows, at least that often."""

EVERY_CHANNEL = (1 << arena.MAX_CHANNELS) - 1


@dataclass(frozen=True)
class _Bucket:
    """A step graph to capture."""

    index: int
    tokens: int
    decode_only: bool


class CudaChain:
    """One life of the chain on the current device.

    Args:
        shared: the arena in host memory that local front ends map.
        progress: told (done, total) of loading, warm-up and capture.
        launches_itself: False leaves each step to `step_once` (for tools that cannot follow launches from the device).

    Raises:
        CudaError: the device or a part of CUDA is missing or refuses, or memory is short.
        ValueError: the configuration does not fit the device.
    """

    def __init__(
        self,
        folder: ModelFolder,
        config: RuntimeConfig,
        limits: ModelLimits,
        shared: SharedArena,
        progress: Progress = lambda done, total: None,
        launches_itself: bool = True,
    ) -> None:
        began = time.monotonic()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._config = scheduler_config(config, limits)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._arena = DeviceArena(shared)
        self._scheduler = DeviceScheduler(self._config, self._arena.inbound.address, self._arena.outbound.address)
        self._board = Board()
        self._kernels = ChainKernels(self._scheduler, self._board, launches_itself)
        self._fill_board(config.serves_local)
        self._graphs: list[StepGraph] = []
        self.graph_bytes = 0
        """Device memory that capturing the graphs took."""
        buckets = self._buckets()
        units = len(folder.tensors.file_of) + 2 * len(buckets)
        progress(0, units)
        with torch.cuda.stream(self._stream):
            self._step = build_step(
                folder, config, self._config, self._scheduler.plan, self._kernels, lambda done: progress(done, units)
            )
            loaded = units - 2 * len(buckets)
            self._warm_up(buckets, lambda done: progress(loaded + done, units))
            if launches_itself:
                self._capture_all(buckets, lambda done: progress(loaded + len(buckets) + done, units))
        progress(units, units)
        self.start_seconds = time.monotonic() - began

    @property
    def graph_count(self) -> int:
        """Step graphs, the idle one included."""
        return len(self._graphs)

    @property
    def bucket_tokens(self) -> list[int]:
        """Sizes of the step graphs, ascending."""
        return [int(b) for b in self._config["buckets"][: int(self._config["bucket_count"])]]

    def start(self) -> None:
        """Launches the chain; from here on the device launches itself."""
        self._graphs[0].launch(self._stream)

    def command(self, command: layout.Command) -> None:
        """Tells the scheduler."""
        self._board.set("command", int(command))

    def set_direct(self, channels: int) -> None:
        """Tells the relay which channels to leave alone: a bit for each."""
        self._board.set("direct", channels)

    def direct_seen(self) -> int:
        """Which ones it leaves alone. A copy over the bus."""
        return self._board.get("direct_seen")

    @property
    def arena(self) -> DeviceArena:
        """In device memory; where it lies does not change."""
        return self._arena

    def ended(self) -> bool:
        """Nothing runs on the chain's stream any more.

        Raises:
            CudaError: the device has failed, or a launch from it.
        """
        try:
            done = bool(self._stream.query())
        except RuntimeError as error:
            raise CudaError(f"the device has failed: {str(error).splitlines()[0]}") from error
        if done and (status := self._board.get("launch_error")):
            raise CudaError(f"a step graph could not be launched from the device: CUDA error {status}")
        return done

    def wait(self, pause: float = 0.01) -> None:
        """Sleeps until the chain has ended (errors: see `ended`)."""
        while not self.ended():
            time.sleep(pause)

    def step_once(self) -> NDArray[Any]:
        """Runs one step from the host, for a chain that does not launch itself; a copy of the next plan's header."""
        header = self._scheduler.header()
        with torch.cuda.stream(self._stream):
            if int(header["tokens"]) == 0:
                self._kernels.begin()
                self._kernels.pull()
                self._kernels.foresee()
                self._kernels.tail()
            else:
                self._step.step(int(header["bucket"]), int(header["tokens"]) == int(header["decode_works"]))
        self._stream.synchronize()
        return np.array(self._scheduler.header())

    def stamps(self) -> NDArray[Any]:
        """layout.StepStamp of the latest finished steps, oldest first."""
        return self._board.stamps()

    def close(self) -> None:
        """Stops the chain and gives its memory back."""
        if self._graphs:
            self.command(layout.Command.STOP)
            self.wait()
        self._graphs.clear()
        for part in (self._scheduler, self._board, self._arena):
            part.free()

    def _fill_board(self, serves_local: bool) -> None:
        """The control process looks at host memory whoever else does."""
        board = self._board
        board.set("longest_poll_ns", LONGEST_POLL_NS)
        board.set("host_outbound", self._arena.host_outbound.address)
        if serves_local:
            board.set("host_inbound", self._arena.host_inbound.address)
        else:
            for word in ("direct", "direct_seen"):
                board.set(word, EVERY_CHANNEL)

    def _buckets(self) -> list[_Bucket]:
        """Largest first: the smaller ones then find their memory in what the larger ones have left."""
        running, found = int(self._config["max_running"]), []
        for index, tokens in reversed(list(enumerate(self.bucket_tokens))):
            found.append(_Bucket(index, tokens, False))
            smaller = self.bucket_tokens[index - 1] if index else 0
            if smaller < running:
                found.append(_Bucket(index, tokens, True))
        return found

    def _warm_up(self, buckets: list[_Bucket], progress: Callable[[int], None]) -> None:
        """Every step once, over an empty plan: compiles kernels and lets libraries choose theirs."""
        for done, bucket in enumerate(buckets):
            self._step.warm_up(bucket.tokens, bucket.decode_only)
            progress(done + 1)
        self._stream.synchronize()

    def _capture_all(self, buckets: list[_Bucket], progress: Callable[[int], None]) -> None:
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        self._graphs.append(capture(self._step.idle, self._stream, pool))
        handles = {kind: np.zeros(layout.MAX_BUCKETS, np.uint64) for kind in ("decode_graphs", "mixed_graphs")}
        for done, bucket in enumerate(buckets):
            graph = capture(lambda b=bucket: self._step.step(b.tokens, b.decode_only), self._stream, pool)  # type: ignore[misc]
            self._graphs.append(graph)
            handles["decode_graphs" if bucket.decode_only else "mixed_graphs"][bucket.index] = graph.handle
            progress(done + 1)
        self._stream.synchronize()
        self._board.set("idle_graph", self._graphs[0].handle)
        for field, words in handles.items():
            self._board.set(field, words)
        self.graph_bytes = before - torch.cuda.mem_get_info()[0]
