"""Step graphs: captured from torch, made launchable from the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_runtime.cuda.errors import check


class StepGraph:
    """One captured graph and its executable.

    The torch graph stays alive as long as this does: it owns the memory that the captured kernels use.
    """

    def __init__(self, captured: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        from cuda.bindings import runtime

        self._captured = captured
        params = runtime.cudaGraphInstantiateParams()
        params.flags = runtime.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagDeviceLaunch
        graph = runtime.cudaGraph_t(captured.raw_cuda_graph())
        self._executable: Any = check(runtime.cudaGraphInstantiateWithParams(graph, params))
        check(runtime.cudaGraphUpload(self._executable, runtime.cudaStream_t(stream.cuda_stream)))

    @property
    def handle(self) -> int:
        """What the device launches."""
        return int(self._executable)

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Launches it from the host."""
        from cuda.bindings import runtime

        check(runtime.cudaGraphLaunch(self._executable, runtime.cudaStream_t(stream.cuda_stream)))


def capture(record: Callable[[], None], stream: torch.cuda.Stream, pool: Any) -> StepGraph:
    """The graph of what `record` puts on `stream`, which is the current stream meanwhile.

    Args:
        pool: torch's pool of graph memory. Graphs that never run at the same time share one.
    """
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        captured.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            record()
        finally:
            captured.capture_end()
    return StepGraph(captured, stream)
