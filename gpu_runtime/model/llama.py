"""The layers of the Llama family over a paged KV cache, with torch on the CPU in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, silu

from gpu_runtime.kernels.attention import RopeTables, Shape, paged_attention, rope_store
from gpu_runtime.kernels.linear import linear
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.rope import rope_tables
from gpu_runtime.model.step import StepInputs
from gpu_runtime.model.weights import Linear, Weights


class KVCache:
    """Keys and values of all blocks, float32 [layers][kv slots, kv_heads, head_dim]; untouched pages cost nothing."""

    def __init__(self, config: ModelConfig, blocks: int, block_tokens: int) -> None:
        shape = (blocks * block_tokens, config.num_key_value_heads, config.head_dim)
        self.block_tokens = block_tokens
        self.keys = [torch.empty(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.empty(shape) for _ in range(config.num_hidden_layers)]


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


def _layer(weights: Weights, config: ModelConfig, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return _Layer(
        input_norm=weights[f"{prefix}.input_layernorm.weight"],
        query=weights.linear(f"{attention}.q_proj"),
        key=weights.linear(f"{attention}.k_proj"),
        value=weights.linear(f"{attention}.v_proj"),
        output=weights.linear(f"{attention}.o_proj"),
        query_norm=weights[f"{attention}.q_norm.weight"] if config.qk_norm else None,
        key_norm=weights[f"{attention}.k_norm.weight"] if config.qk_norm else None,
        mlp_norm=weights[f"{prefix}.post_attention_layernorm.weight"],
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
        self._norm = weights["model.norm.weight"]
        tied = config.tie_word_embeddings
        self._head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]

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
            hidden += self._attention(index, layer, hidden, step, shape)
            hidden += self._mlp(layer, hidden)
        return self._logits(hidden, step)

    def _attention(
        self, index: int, layer: _Layer, hidden: torch.Tensor, step: StepInputs, shape: Shape
    ) -> torch.Tensor:
        normed = self._normed(hidden, layer.input_norm)
        query, key, value = layer.query(normed), layer.key(normed), layer.value(normed)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._head_normed(query, layer.query_norm), self._head_normed(key, layer.key_norm)
        keys, values = self._cache.keys[index], self._cache.values[index]
        rope_store(query, key, value, step.positions, step.kv_slots, shape, self._tables, keys, values)
        return layer.output(paged_attention(query, keys, values, step.works, step.block_table, shape))

    def _mlp(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._normed(hidden, layer.mlp_norm)
        return layer.down(silu(layer.gate(normed), inplace=True).mul_(layer.up(normed)))

    def _logits(self, hidden: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Only sampled rows go through the head."""
        wanted = torch.from_numpy(step.sampled_tokens.astype("int64"))
        return linear(self._normed(hidden[wanted], self._norm), self._head)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _head_normed(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shaped = heads.view(heads.shape[0], -1, self.config.head_dim)
        return self._normed(shaped, weight).view(heads.shape)
