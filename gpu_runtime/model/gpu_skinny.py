"""The projections of a decode step with few tokens, by the kernels that read each matrix once at full speed."""

from __future__ import annotations

import torch

from gpu_runtime.kernels.gpu.skinny import SkinnyKernels, Weighted, supports
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.gpu_weights import GpuLayer, GpuWeights


class SkinnyProjections:
    """`Projections` of `gpu_llama` for steps of at most `skinny.MAX_TOKENS` tokens of a bf16 model.

    Raises:
        ValueError: (by every method) the tensors are none that the kernels take; ask `takes` first.
    """

    def __init__(self, config: ModelConfig, weights: GpuWeights, kernels: SkinnyKernels | None = None) -> None:
        self._kernels = kernels or SkinnyKernels()
        self._epsilon = config.rms_norm_eps
        self._norm, self._head = Weighted(weights.norm, config.rms_norm_eps), weights.head

    @staticmethod
    def takes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> bool:
        """Whether all products of a step of so many tokens can be computed here."""
        attended = config.num_attention_heads * config.head_dim
        widths = (config.hidden_size, attended, config.intermediate_size)
        return all(supports(tokens, width, config.hidden_size, dtype) for width in widths)

    def qkv(self, hidden: torch.Tensor, layer: GpuLayer) -> torch.Tensor:
        """See Projections."""
        norm = Weighted(layer.input_norm, self._epsilon)
        return self._kernels.project(hidden, norm, layer.qkv.weight, layer.qkv.bias)

    def output(self, attended: torch.Tensor, residual: torch.Tensor, layer: GpuLayer) -> None:
        """See Projections."""
        self._kernels.project_onto(residual, attended, layer.output.weight, layer.output.bias)

    def gated(self, hidden: torch.Tensor, layer: GpuLayer) -> torch.Tensor:
        """See Projections."""
        norm = Weighted(layer.mlp_norm, self._epsilon)
        return self._kernels.project_gated(hidden, norm, layer.gate_up.weight, layer.gate_up.bias)

    def down(self, gated: torch.Tensor, residual: torch.Tensor, layer: GpuLayer) -> None:
        """See Projections."""
        self._kernels.project_onto(residual, gated, layer.down.weight, layer.down.bias)

    def head(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See Projections."""
        return self._kernels.project(hidden, self._norm, self._head, rows=rows, dtype=torch.float32)
