"""Weights of a checked model folder as float32 tensors, memory-mapped where the file holds float32 already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors import safe_open

from gpu_runtime.kernels.linear import linear
from gpu_runtime.model.source import ModelFolder

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Linear:
    """A matrix [out, in] and an optional bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[tokens, in] → [tokens, out]."""
        return linear(inputs, self.weight, self.bias)


class Weights:
    """Tensors by their Hugging Face names."""

    def __init__(self, folder: ModelFolder, progress: Progress) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        files = folder.tensors.file_of
        for path in sorted(set(files.values())):
            # CPU tensors of safe_open are views of the mapped file: no copy for float32.
            with safe_open(path, framework="pt") as opened:
                for name in (name for name, holder in files.items() if holder == path):
                    self._tensors[name] = opened.get_tensor(name).float()
                    progress(len(self._tensors), len(files))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def linear(self, name: str) -> Linear:
        """A matrix and, where the model has one, its bias."""
        return Linear(self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))
