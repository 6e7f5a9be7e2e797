"""Small random models of every family as folders, of sizes that all kernels of the GPU take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny import save_tokenizer

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "sliding_window": None,
}


def save_small(folder: Path, family: str, **changes: Any) -> Path:
    """Saves a model (`family`: Llama, Mistral, Qwen2, Qwen3), norms and biases random as well, and its tokenizer."""
    import transformers

    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | changes))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_(0, SIZES["hidden_size"] ** -0.5)
    model.float().save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json", VOCABULARY)
    return folder
