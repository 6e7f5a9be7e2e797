"""The least time that a step can take: the bytes it must read, or the operations it must do, at measured rates."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.tensors import expected_shapes

BYTES_PER_SECOND = 4.40e12
"""Read bandwidth of an H200, measured by summing 8 GiB."""
OPERATIONS_PER_SECOND = 790e12
"""bf16 matrix products of random numbers (8192 x 8192 x 8192) on an H200, measured."""
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Floor:
    """Bytes and operations of a step; the slower of both counts.

    Weights are read once a step, the embedding only as far as it is the head too. Keys and values of each context are
    read once; those of the step's own tokens are written, which is left out, as activations are.
    """

    bytes: int
    operations: int

    @property
    def seconds(self) -> float:
        """The least time."""
        return max(self.bytes / BYTES_PER_SECOND, self.operations / OPERATIONS_PER_SECOND)


def weight_numbers(config: ModelConfig) -> int:
    """Numbers of all weights that a step reads."""
    shapes = expected_shapes(config)
    numbers = sum(prod(shape) for shape in shapes.values())
    return numbers if config.tie_word_embeddings else numbers - prod(shapes[EMBEDDING])


def kv_numbers(config: ModelConfig) -> int:
    """Numbers of keys and values of one position."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def head_numbers(config: ModelConfig) -> int:
    """Numbers of the head's matrix."""
    return config.vocab_size * config.hidden_size


def decode_floor(config: ModelConfig, sequences: int, context: int, bytes_each: int = 2) -> Floor:
    """One token for each of so many sequences whose contexts are so long."""
    numbers = weight_numbers(config) + sequences * context * kv_numbers(config)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
    return Floor(numbers * bytes_each, sequences * (2 * weight_numbers(config) + attention))


def prefill_floor(config: ModelConfig, tokens: int, bytes_each: int = 2) -> Floor:
    """A prompt of so many tokens in one step, with one token sampled in the end.

    Attention is causal: a query sees half of the keys on average, with two products of `head_dim` for each.
    """
    layers = weight_numbers(config) - head_numbers(config)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens * (tokens + 1) // 2
    operations = 2 * layers * tokens + 2 * head_numbers(config) + attention
    return Floor(weight_numbers(config) * bytes_each, operations)
