"""Random models of any size for the GPU's layers, made by transformers, without files between."""

from __future__ import annotations

from typing import Any

import torch

from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.gpu_weights import GpuWeights

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}


def random_model(family: str, seed: int, **changes: Any) -> Any:
    """A transformers model (`family`: Llama, Mistral, Qwen2, Qwen3) in float32, norms and biases random as well."""
    import transformers

    torch.manual_seed(seed)
    sizes = SIZES | changes
    config = getattr(transformers, f"{family}Config")(**sizes, architectures=[f"{family}ForCausalLM"])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.uniform_(-0.5, 0.5)
            else:
                tensor.normal_(0, sizes["hidden_size"] ** -0.5)
    return model


def take_weights(model: Any, dtype: torch.dtype, device: torch.device | str) -> tuple[ModelConfig, GpuWeights]:
    """The configuration and the weights of a transformers model, as the GPU's layers want them."""
    config = ModelConfig.from_dict(model.config.to_dict())
    weights = GpuWeights(config, dtype, torch.device(device))
    state = model.state_dict()
    for name, part in weights.parts.items():
        part.copy_(state[name])
    return config, weights


def whole_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of every token of a sequence [tokens, vocabulary], by one pass of transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens], device=model.device)).logits[0]
    return logits
