"""The layers of the Llama family over a paged KV cache, with torch on the CPU in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_runtime.kernels.attention import RopeTables, Shape, paged_attention, rope_store
from gpu_runtime.kernels.linear import Linear, Norm, project, project_gated, project_onto, rms_norm
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.rope import rope_tables
from gpu_runtime.model.step import StepInputs
from gpu_runtime.model.weights import Weights


class KVCache:
    """Keys and values of all blocks, float32 [layers][kv slots, kv_heads, head_dim]; untouched pages cost nothing."""

    def __init__(self, config: ModelConfig, blocks: int, block_tokens: int) -> None:
        shape = (blocks * block_tokens, config.num_key_value_heads, config.head_dim)
        self.block_tokens = block_tokens
        self.keys = [torch.empty(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.empty(shape) for _ in range(config.num_hidden_layers)]


@dataclass(frozen=True)
class _Layer:
    input_norm: Norm
    query_key_value: tuple[Linear, Linear, Linear]
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


def _layer(weights: Weights, config: ModelConfig, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query, key, value = (weights.linear(f"{attention}.{part}_proj") for part in "qkv")
    return _Layer(
        input_norm=weights.norm(f"{prefix}.input_layernorm"),
        query_key_value=(query, key, value),
        query_norm=weights.norm(f"{attention}.q_norm") if config.qk_norm else None,
        key_norm=weights.norm(f"{attention}.k_norm") if config.qk_norm else None,
        output=weights.linear(f"{attention}.o_proj"),
        mlp_norm=weights.norm(f"{prefix}.post_attention_layernorm"),
        gate=weights.linear(f"{mlp}.gate_proj"),
        up=weights.linear(f"{mlp}.up_proj"),
        down=weights.linear(f"{mlp}.down_proj"),
    )


class LlamaModel:
    """Llama, Mistral, Qwen2 and Qwen3.

    Args:
        window: positions that the rotary tables cover.
    """

    def __init__(self, config: ModelConfig, weights: Weights, cache: KVCache, window: int) -> None:
        self.config = config
        self._cache = cache
        self._tables: RopeTables = rope_tables(config, window)
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers = [_layer(weights, config, index) for index in range(config.num_hidden_layers)]
        self._norm = weights.norm("model.norm")
        self._head = weights.linear("model.embed_tokens" if config.tie_word_embeddings else "lm_head")

    @torch.inference_mode()
    def forward(self, step: StepInputs) -> torch.Tensor:
        """Logits of the sampled tokens, float32 [rows, vocabulary]; fills the KV cache."""
        config = self.config
        shape = Shape(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            self._cache.block_tokens,
            step.block_table.shape[1],
        )
        hidden = self._embedding[torch.from_numpy(step.token_ids)]
        for index, layer in enumerate(self._layers):
            attended = self._attention(index, layer, hidden, step, shape)
            project_onto(hidden, attended, layer.output)
            gated = project_gated(hidden, layer.gate, layer.up, layer.mlp_norm)
            project_onto(hidden, gated, layer.down)
        return self._logits(hidden, step)

    def _attention(
        self, index: int, layer: _Layer, hidden: torch.Tensor, step: StepInputs, shape: Shape
    ) -> torch.Tensor:
        query, key, value = project(hidden, layer.query_key_value, layer.input_norm)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._head_normed(query, layer.query_norm), self._head_normed(key, layer.key_norm)
        keys, values = self._cache.keys[index], self._cache.values[index]
        rope_store(query, key, value, step.positions, step.kv_slots, shape, self._tables, keys, values)
        return paged_attention(query, keys, values, step.works, step.block_table, shape)

    def _logits(self, hidden: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Only sampled rows go through the head."""
        wanted = torch.from_numpy(step.sampled_tokens.astype("int64"))
        (logits,) = project(hidden[wanted], [self._head], self._norm)
        return logits

    def _head_normed(self, heads: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(heads.view(heads.shape[0], -1, self.config.head_dim), norm).view(heads.shape)
