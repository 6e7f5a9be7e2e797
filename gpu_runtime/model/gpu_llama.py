"""The layers of the Llama family on the GPU, over a paged KV cache, driven by a plan in device memory.

Everything here can be captured in a CUDA graph: sizes depend on the step's bucket alone, and what varies from step to
step is read from the plan by the kernels. Tokens of padding are computed like others; what is stored of them goes to
the scratch block.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_runtime.kernels.attention import RopeTables, Shape
from gpu_runtime.kernels.gpu.attention_decode import DecodeScratch, Release, decode_attention, fused_decode_attention
from gpu_runtime.kernels.gpu.attention_prefill import chunk_attention
from gpu_runtime.kernels.gpu.gated import silu_mul
from gpu_runtime.kernels.gpu.norm import gather_norm, rms_norm
from gpu_runtime.kernels.gpu.rope_store import rope_store
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.device_plan import DevicePlan
from gpu_runtime.model.gpu_weights import GpuLayer, GpuLinear, GpuWeights
from gpu_runtime.model.rope import rope_tables


class KVCache:
    """Keys and values of all blocks: a tensor [blocks, kv_heads, block_tokens, head_dim] each for every layer.

    Zeroed once, so that what no sequence wrote yet is at least a number.
    """

    def __init__(
        self, config: ModelConfig, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (blocks, config.num_key_value_heads, block_tokens, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]

    @staticmethod
    def block_bytes(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all layers."""
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * block_tokens * config.head_dim
        return numbers * dtype.itemsize


class Projections(Protocol):
    """The products with a model's matrices, and what can be fused with them, for any number of tokens."""

    def qkv(self, hidden: torch.Tensor, layer: GpuLayer) -> torch.Tensor:
        """Norms hidden [tokens, hidden_size] → [tokens, (query_heads + 2 · kv_heads) · head_dim], contiguous."""

    def output(self, attended: torch.Tensor, residual: torch.Tensor, layer: GpuLayer) -> None:
        """Adds the projection of attended [tokens, query_heads · head_dim] to residual, in place."""

    def gated(self, hidden: torch.Tensor, layer: GpuLayer) -> torch.Tensor:
        """Norms hidden, then silu(gate) · up → [tokens, intermediate_size]."""

    def down(self, gated: torch.Tensor, residual: torch.Tensor, layer: GpuLayer) -> None:
        """Adds the projection of gated to residual, in place."""

    def head(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Norms hidden[rows] → logits, float32 [len(rows), vocab_size]; `rows` as in `gather_norm`."""


class TorchProjections:
    """Products by torch (cuBLAS); norms and the activation by kernels of their own.

    Args:
        programmatic: let those kernels start beside the ones in front.
    """

    def __init__(self, config: ModelConfig, weights: GpuWeights, programmatic: bool = False) -> None:
        self._epsilon, self._programmatic = config.rms_norm_eps, programmatic
        self._norm, self._head = weights.norm, weights.head

    def qkv(self, hidden: torch.Tensor, layer: GpuLayer) -> torch.Tensor:
        """See Projections."""
        return _project(rms_norm(hidden, layer.input_norm, self._epsilon, self._programmatic), layer.qkv)

    def output(self, attended: torch.Tensor, residual: torch.Tensor, layer: GpuLayer) -> None:
        """See Projections."""
        _project_onto(residual, attended, layer.output)

    def gated(self, hidden: torch.Tensor, layer: GpuLayer) -> torch.Tensor:
        """See Projections."""
        normed = rms_norm(hidden, layer.mlp_norm, self._epsilon, self._programmatic)
        return silu_mul(_project(normed, layer.gate_up), self._programmatic)

    def down(self, gated: torch.Tensor, residual: torch.Tensor, layer: GpuLayer) -> None:
        """See Projections."""
        _project_onto(residual, gated, layer.down)

    def head(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See Projections."""
        normed, weight = gather_norm(hidden, rows, self._norm, self._epsilon, self._programmatic), self._head.T
        if weight.dtype == torch.float32:
            return torch.mm(normed, weight)
        return torch.mm(normed, weight, out_dtype=torch.float32)


def _project(inputs: torch.Tensor, linear: GpuLinear) -> torch.Tensor:
    if linear.bias is None:
        return torch.mm(inputs, linear.weight.T)
    return torch.addmm(linear.bias, inputs, linear.weight.T)


def _project_onto(residual: torch.Tensor, inputs: torch.Tensor, linear: GpuLinear) -> None:
    """The sum is rounded once, in the product's own epilogue."""
    residual.addmm_(inputs, linear.weight.T)
    if linear.bias is not None:
        residual += linear.bias


class GpuLlama:
    """Llama, Mistral, Qwen2 and Qwen3.

    Args:
        window: positions that the rotary tables cover.
        plan: where the scheduler writes what the steps are to compute.
        max_running: entries of a step's work list at most, and of its rows.
        overlap: let kernels start beside the ones in front, where the device can.
        fuse: rotate and store within attention where all works are decodes, rather than by a kernel in front of it.
        release: when the kernel behind attention may start, where kernels overlap.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: GpuWeights,
        cache: KVCache,
        window: int,
        plan: DevicePlan,
        max_running: int,
        overlap: bool = True,
        fuse: bool = True,
        release: Release = "late",
    ) -> None:
        _forbid_short_arithmetic()
        device = weights.embedding.device
        tables = rope_tables(config, window)
        self.config, self.weights = config, weights
        self._programmatic = overlap and can_overlap(device)
        self._fuse, self._release = fuse, release
        self.torch_projections = TorchProjections(config, weights, self._programmatic)
        self._cache, self._plan, self._max_running = cache, plan, max_running
        self._tables = RopeTables(tables.cosines.to(device), tables.sines.to(device))
        self._shape = Shape(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            cache.keys[0].shape[2],
            plan.block_table.shape[1],
        )
        self._width = config.num_attention_heads * config.head_dim
        self._scratch = DecodeScratch.allocate(max_running, self._shape, device)
        # Zeroed once and shared by all steps: attention leaves padding as it is, which must stay a number.
        self._attended = torch.zeros(len(plan.token_ids), self._width, dtype=weights.dtype, device=device)

    @torch.no_grad()
    def forward(self, tokens: int, decode_only: bool, projections: Projections | None = None) -> torch.Tensor:
        """Logits of the plan's rows, float32 [min(tokens, max_running), vocabulary]; fills the KV cache.

        Args:
            tokens: the step's bucket.
            decode_only: no work of the step has more than one token.
            projections: how to multiply; by torch unless told otherwise.
        """
        by, plan = projections or self.torch_projections, self._plan
        hidden = torch.nn.functional.embedding(plan.token_ids[:tokens], self.weights.embedding)
        for layer in self.weights.layers:
            attended = self._attention(by.qkv(hidden, layer), layer, decode_only)
            by.output(attended, hidden, layer)
            by.down(by.gated(hidden, layer), hidden, layer)
        return by.head(hidden, plan.rows[: min(tokens, self._max_running), 0])

    def _attention(self, qkv: torch.Tensor, layer: GpuLayer, decode_only: bool) -> torch.Tensor:
        plan, tokens, shape = self._plan, len(qkv), self._shape
        keys, values = self._cache.keys[layer.index], self._cache.values[layer.index]
        tables, norms, overlap, release = self._tables, layer.head_norms, self._programmatic, self._release
        works, scratch, attended = min(tokens, self._max_running), self._scratch, self._attended[:tokens]
        if decode_only and self._fuse:
            fused_decode_attention(
                qkv, keys, values, plan, works, shape, scratch, attended, tables, norms, None, overlap, release
            )
            return attended
        rope_store(qkv, plan.positions, plan.kv_slots, tables, norms, keys, values, overlap)
        queries = qkv[:, : self._width]
        decode_attention(queries, keys, values, plan, works, shape, scratch, attended, None, overlap, release)
        if not decode_only:
            chunk_attention(queries, keys, values, plan, tokens, works, shape, attended)
        return attended


def can_overlap(device: torch.device) -> bool:
    """Whether kernels may start before the one in front has ended: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _forbid_short_arithmetic() -> None:
    """float32 products are float32 (no tf32), and partial sums of bfloat16 products are added in float32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
