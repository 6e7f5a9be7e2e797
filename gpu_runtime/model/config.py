"""The configuration of a Llama-family model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_runtime.model.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_MOST = {
    "num_hidden_layers": 1024,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "vocab_size": 1 << 23,
    "max_position_embeddings": 1 << 24,
}
"""Far more than any published model has (126 layers, 16,384 and 53,248 wide, 128 heads, 262,144 tokens, 10,485,760
positions), and so little that whatever is done for each layer or position ends soon and every size fits 64 bits. Of
tokens it is also what the sampling kernels can add the weights of."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: `default`, `linear` (factor) or `llama3` (all fields)."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants, named as in `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Reads `config.json`.

        Raises:
            ModelError: missing, malformed, or of an unsupported kind.
        """
        return cls.from_dict(read_json(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Checks the content of `config.json` (errors: see from_file)."""
        architecture = _architecture(raw)
        _refuse_unsupported(raw, architecture)
        hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
        kv_heads = _positive(raw, "num_key_value_heads", heads)
        head_dim = _positive(raw, "head_dim", hidden // heads)
        if heads % kv_heads:
            raise ModelError(f"{heads} query heads cannot share {kv_heads} key/value heads")
        if head_dim % 8 or head_dim > 256:
            raise ModelError(f"head_dim {head_dim} is not supported (multiples of 8 up to 256)")
        bias = architecture == "Qwen2ForCausalLM" or (_takes_bias(architecture) and bool(raw.get("attention_bias")))
        return cls(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_hidden_layers=_positive(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_positive(raw, "max_position_embeddings"),
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            rope_scaling=_rope_scaling(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias,
            output_bias=bias and _takes_bias(architecture),
            mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias")),
            qk_norm=architecture == "Qwen3ForCausalLM",
        )


def eos_token_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Every stop token that `generation_config.json` and `config.json` name, ascending.

    Raises:
        ModelError: one is not in the vocabulary.
    """
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ModelError(f"eos_token_id {token!r} is not in the vocabulary")
    return tuple(sorted(set(found)))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: missing or malformed.
    """
    refuse_unless_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def refuse_unless_file(path: Path) -> None:
    """Whoever opens a pipe waits for its other end.

    Raises:
        ModelError: missing, or not a regular file.
    """
    if not path.exists():
        raise ModelError(f"{path.name} is missing in {path.parent}")
    if not path.is_file():
        raise ModelError(f"{path} is not a regular file")


def _architecture(raw: dict[str, Any]) -> str:
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ModelError(f"architecture {named!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return str(named[0])


def _refuse_unsupported(raw: dict[str, Any], architecture: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported, only silu")
    if raw.get("quantization_config"):
        raise ModelError("quantised safetensors are not supported; use the unquantised model or a GGUF file")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial rotary embedding is not supported")
    _refuse_sliding_window(raw, architecture)


def _takes_bias(architecture: str) -> bool:
    """Whether `attention_bias` means something: biases of all four projections. (Qwen2 has three of them always.)"""
    return architecture in {"LlamaForCausalLM", "Qwen3ForCausalLM"}


def _refuse_sliding_window(raw: dict[str, Any], architecture: str) -> None:
    used = raw.get("use_sliding_window", architecture == "MistralForCausalLM")
    if used and raw.get("sliding_window") is not None:
        window, context = _positive(raw, "sliding_window"), _positive(raw, "max_position_embeddings")
        if window < context:
            raise ModelError(f"sliding-window attention ({window} of {context} positions) is not supported")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ModelError("layers without full attention are not supported")


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ModelError(f"config.json: {key} is {_shown(value)}, not a positive integer")
    if value > _MOST.get(key, value):
        raise ModelError(f"config.json: {key} is {value}, at most {_MOST[key]} is supported")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _number(raw: dict[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} is {_shown(value)}, not a positive number")
    return float(value)


def _rope_raw(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    value = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(value, dict):
        raise ModelError("config.json: rope_scaling is not an object")
    return value


def _rope_theta(raw: dict[str, Any]) -> float:
    return _number(raw if raw.get("rope_theta") is not None else _rope_raw(raw), "rope_theta", 10000.0)


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling:
    rope = _rope_raw(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
    if kind == "default":
        return RopeScaling()
    factor = _number(rope, "factor", 1.0)
    if kind == "linear":
        return RopeScaling(kind, factor)
    low, high = _number(rope, "low_freq_factor", 1.0), _number(rope, "high_freq_factor", 4.0)
    if low >= high:
        raise ModelError(f"config.json: low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeScaling(kind, factor, low, high, _positive(rope, "original_max_position_embeddings", 8192))
