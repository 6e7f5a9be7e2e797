"""Shapes of models that are measured with random weights: `config.json`, and a tokenizer of one token a letter."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}


def shape_config(name: str) -> dict[str, Any]:
    """The content of `config.json` of a shape."""
    return _COMMON | SHAPES[name]


def write_folder(folder: Path, name: str) -> Path:
    """A model folder without weights (`--random-weights`)."""
    from tests.tiny import save_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape_config(name)), encoding="utf-8")
    save_tokenizer(folder / "tokenizer.json", SHAPES[name]["vocab_size"])
    return folder


def letters(count: int, seed: int) -> Iterator[str]:
    """Endless different texts of `count` letters: with the tokenizer above, of `count` tokens."""
    source = random.Random(seed)
    while True:
        yield "".join(source.choices(string.ascii_lowercase, k=count))


def token_prompt(count: int, vocab_size: int, seed: int) -> list[int]:
    """Random token ids, none of them special."""
    source = random.Random(seed)
    return [source.randrange(3, vocab_size) for _ in range(count)]
