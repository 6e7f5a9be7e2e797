"""One step on the GPU as it is captured: layers, head and sampling, with the chain's own kernels around them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_runtime.chain.chain_kernels import ChainKernels
from gpu_runtime.model.gpu_llama import GpuLlama, Projections
from gpu_runtime.model.gpu_weights import GpuLayer

Sampler = Callable[[torch.Tensor, int], None]
"""Samples a token for each of the plan's rows from logits [rows at most, vocabulary], into the plan's `sampled`."""


class CudaStep:
    """Puts steps on the current stream.

    Args:
        projections: which products a step of so many tokens is computed by.
    """

    def __init__(
        self,
        model: GpuLlama,
        projections: Callable[[int], Projections],
        sample: Sampler,
        kernels: ChainKernels,
    ) -> None:
        self._model, self._projections, self._sample = model, projections, sample
        self._kernels = kernels
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def step(self, tokens: int, decode_only: bool) -> None:
        """A step of a bucket of so many tokens, up to and including the scheduler."""
        self._beside(self._kernels.begin)
        logits = self._logits(tokens, decode_only, lambda: self._beside(self._look_ahead))
        torch.cuda.current_stream().wait_stream(self._side)
        self._sample(logits, len(logits))
        self._kernels.tail()

    def idle(self) -> None:
        """What runs while there is nothing to compute."""
        self._kernels.begin()
        self._kernels.poll()
        self._look_ahead()
        self._kernels.tail()

    def warm_up(self, tokens: int, decode_only: bool) -> None:
        """Layers, head and sampling alone."""
        logits = self._logits(tokens, decode_only, lambda: None)
        self._sample(logits, len(logits))

    def _logits(self, tokens: int, decode_only: bool, before_head: Callable[[], None]) -> torch.Tensor:
        return self._model.forward(tokens, decode_only, _WithHook(self._projections(tokens), before_head))

    def _look_ahead(self) -> None:
        """Late in the step, so that it sees what has come during the layers, and off the way to the sampled token."""
        self._kernels.pull()
        self._kernels.foresee()

    def _beside(self, launch: Callable[[], None]) -> None:
        """On the side stream, from here on."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            launch()


class _WithHook:
    """Projections that call something before the head."""

    def __init__(self, inner: Projections, before_head: Callable[[], None]) -> None:
        self._inner, self._before_head = inner, before_head
        self.output, self.gated, self.down = inner.output, inner.gated, inner.down

    def qkv(self, hidden: torch.Tensor, layer: GpuLayer) -> torch.Tensor:
        """See Projections."""
        return self._inner.qkv(hidden, layer)

    def head(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See Projections."""
        self._before_head()
        return self._inner.head(hidden, rows)
