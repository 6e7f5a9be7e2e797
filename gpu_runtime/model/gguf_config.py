"""Translates the metadata of a GGUF file into a Hugging Face `config.json`."""

from __future__ import annotations

from typing import Any

from gpu_runtime.model.errors import ModelError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def build_config(fields: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    """Content of `config.json`.

    Raises:
        ModelError: an unsupported architecture, or a field is missing.
    """
    kind = fields.get("general.architecture")
    if kind not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelError(f"GGUF architecture {kind!r} is not supported; supported: {supported}")

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"{kind}.{name}", default)
        if value is None:
            raise ModelError(f"GGUF field {kind}.{name} is missing")
        return value

    if fields.get(f"{kind}.rope.scaling.type", "none") not in {"none", "linear"} or "rope_freqs.weight" in tensor_names:
        raise ModelError("GGUF files with this rope scaling are not supported; use the Hugging Face folder")
    heads, hidden = field("attention.head_count"), field("embedding_length")
    scaling = fields.get(f"{kind}.rope.scaling.factor")
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": field("attention.key_length", hidden // heads),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": {"rope_type": "linear", "factor": scaling} if scaling else None,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "hidden_act": "silu",
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }
