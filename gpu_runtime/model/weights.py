"""Weights of a checked model folder as float32 tensors, memory-mapped where the file holds float32 already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors import safe_open

from gpu_runtime.kernels.linear import Linear, Norm
from gpu_runtime.model.source import ModelFolder

Progress = Callable[[int, int], None]


class Weights:
    """Tensors by their Hugging Face names.

    Matrices are not fused into larger ones: that would copy what is mapped, and the kernels take several at a time.
    """

    def __init__(self, folder: ModelFolder, progress: Progress) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._epsilon = folder.config.rms_norm_eps
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

    def norm(self, name: str) -> Norm:
        """A root-mean-square norm."""
        return Norm(self._tensors[f"{name}.weight"], self._epsilon)
