"""Reading `config.json`, and refusing what it may not say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpu_runtime.model.config import ModelConfig, eos_token_ids
from gpu_runtime.model.errors import ModelError
from gpu_runtime.model.tensors import read_header

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture"),
        ({"architectures": None}, "architecture"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "share"),
        ({"head_dim": 12}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64}, "sliding"),
        ({"layer_types": ["sliding_attention"]}, "attention"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}}, "low_freq"),
        ({"rope_scaling": [8.0]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "llama3"),
    ],
)
def test_config_refuses(change: dict, word: str) -> None:
    with pytest.raises(ModelError, match=word):
        ModelConfig.from_dict(LLAMA | change)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ],
)
def test_sizes_have_bounds(key: str) -> None:
    """At once, whatever else would be made of them; the largest models published are far below."""
    large = {
        "vocab_size": 262_144,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 10_485_760,
        "head_dim": 128,
    }
    assert getattr(ModelConfig.from_dict(LLAMA | large), key) == large[key]
    for value in (10**9, 2**31 - 1, 10**30, 0, -1, 1.5, True, "9" * 1000):
        with pytest.raises(ModelError, match=f"config.json: {key} is ") as refused:
            ModelConfig.from_dict(LLAMA | large | {key: value})
        assert len(str(refused.value)) < 140


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="not a regular file"):
        ModelConfig.from_file(tmp_path / "config.json")
    with pytest.raises(ModelError, match="not a regular file"):
        read_header(tmp_path / "model.safetensors")


def test_config_defaults() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (16, 4, 10000.0)
    assert not config.tie_word_embeddings


def test_a_window_that_covers_the_context_is_none() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    for window in (None, 128, 4096):
        assert ModelConfig.from_dict(mistral | {"sliding_window": window}).max_position_embeddings == 128
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 64}
    assert ModelConfig.from_dict(qwen).qkv_bias


def test_every_stop_token_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    assert eos_token_ids(tmp_path, 100) == (3, 7, 9)
    with pytest.raises(ModelError, match="vocabulary"):
        eos_token_ids(tmp_path, 8)
