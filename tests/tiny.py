"""Tiny random models of every supported family, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}


def make_tiny(family: str) -> Any:
    """A transformers model with random weights, biases and norms included."""
    import transformers

    name, changes = FAMILIES[family]
    torch.manual_seed(len(family))
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if "norm" in tensor_name:
                tensor.uniform_(0.5, 1.5)
            elif tensor_name.endswith("bias"):
                tensor.uniform_(-0.5, 0.5)
    return model


def save_tiny(folder: Path, family: str) -> Path:
    """Saves the model and a byte-level tokenizer of the same vocabulary size."""
    make_tiny(family).save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json", SIZES["vocab_size"])
    return folder


def save_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level BPE without merges: 3 special tokens, 256 bytes, and fillers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "</s>", *alphabet]
    words += [f"filler{index}" for index in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(path))
