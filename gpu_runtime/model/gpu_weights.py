"""Weights on the GPU, all of one type; matrices that read the same inputs are fused into one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from safetensors import safe_open

from gpu_runtime.kernels.gpu.rope_store import HeadNorms
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.source import ModelFolder
from gpu_runtime.model.tensors import expected_shapes

Progress = Callable[[int, int], None]

_READERS = 4
_STAGING_BYTES = 32 << 20


@dataclass(frozen=True)
class GpuLinear:
    """A matrix [out, in] and an optional bias [out], contiguous, in the model's type."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class GpuLayer:
    """Weights of one layer; norms are [hidden_size].

    `qkv`: rows of all query heads, then key heads, then value heads. `gate_up`: rows of the gate, then of
    the other half.
    """

    index: int
    input_norm: torch.Tensor
    qkv: GpuLinear
    head_norms: HeadNorms | None
    output: GpuLinear
    mlp_norm: torch.Tensor
    gate_up: GpuLinear
    down: GpuLinear


class GpuWeights:
    """Memory for all weights of a model, not filled yet.

    Attributes:
        parts: a view for each Hugging Face name, a fused matrix having several.
        head: [vocab_size, hidden_size], the embedding itself where they are tied.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"weights on the GPU are bfloat16 or float32, not {dtype}")
        self.parts: dict[str, torch.Tensor] = {}
        self._shapes = expected_shapes(config)
        self._dtype, self._device = dtype, device
        self.embedding = self._tensor("model.embed_tokens.weight")
        self.layers = [self._layer(config, index) for index in range(config.num_hidden_layers)]
        self.norm = self._tensor("model.norm.weight")
        self.head = self.embedding if config.tie_word_embeddings else self._tensor("lm_head.weight")

    @property
    def dtype(self) -> torch.dtype:
        """Type of all weights."""
        return self._dtype

    def _layer(self, config: ModelConfig, index: int) -> GpuLayer:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return GpuLayer(
            index=index,
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear([f"{attention}.{part}_proj" for part in "qkv"]),
            head_norms=self._head_norms(attention, config.rms_norm_eps) if config.qk_norm else None,
            output=self._linear([f"{attention}.o_proj"]),
            mlp_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=self._linear([f"{mlp}.down_proj"]),
        )

    def _head_norms(self, attention: str, epsilon: float) -> HeadNorms:
        query, key = (self._tensor(f"{attention}.{part}_norm.weight") for part in "qk")
        return HeadNorms(query, key, epsilon)

    def _linear(self, names: Sequence[str]) -> GpuLinear:
        biased = f"{names[0]}.bias" in self._shapes
        weight = self._fused([f"{name}.weight" for name in names])
        return GpuLinear(weight, self._fused([f"{name}.bias" for name in names]) if biased else None)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._fused([name])

    def _fused(self, names: Sequence[str]) -> torch.Tensor:
        """One tensor for all of `names`, one below the other."""
        rows = [self._shapes[name][0] for name in names]
        whole = torch.empty((sum(rows), *self._shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        self.parts.update(zip(names, torch.split(whole, rows), strict=True))
        return whole


def load_weights(
    folder: ModelFolder, dtype: torch.dtype, progress: Progress, device: torch.device | str = "cuda"
) -> GpuWeights:
    """Loads a checked folder; `progress` is told (tensors done, tensors in all).

    Besides the weights themselves it takes a few staging buffers of pinned memory, and on the device, where the file
    has another type, one as large.
    """
    weights = GpuWeights(folder.config, dtype, torch.device(device))
    files = folder.tensors.file_of
    staging = _Staging(torch.cuda.current_stream() if weights.embedding.is_cuda else None)
    with ThreadPoolExecutor(_READERS) as pool:
        jobs: list[Future[None]] = []
        for path in sorted(set(files.values())):
            # Tensors of safe_open are views of the mapped file: a reader's copy is what reads them.
            with safe_open(path, framework="pt") as opened:
                names = [name for name, holder in files.items() if holder == path]
                jobs += [pool.submit(staging.copy, opened.get_tensor(name), weights.parts[name]) for name in names]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            progress(done, len(files))
    return weights


class _Staging(threading.local):
    """A pinned buffer for each reading thread: one reads the file while another's buffer crosses the bus.

    Args:
        stream: where targets may be written; None when they are in host memory.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._buffer = torch.empty(_STAGING_BYTES if stream else 0, dtype=torch.uint8, pin_memory=stream is not None)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies host memory to a contiguous target of the same shape; it is there when this returns."""
        if self._stream is None:
            target.copy_(source)
            return
        room = self._buffer.view(source.dtype)
        sources, targets = (torch.split(tensor.view(-1), len(room)) for tensor in (source, target))
        with torch.cuda.stream(self._stream):
            for piece, place in zip(sources, targets, strict=True):
                # Not blocking, since only then a change of type happens on the device.
                place.copy_(room[: len(piece)].copy_(piece), non_blocking=True)
                self._stream.synchronize()


def random_weights(
    config: ModelConfig, dtype: torch.dtype, seed: int, device: torch.device | str = "cuda"
) -> GpuWeights:
    """Normal matrices that keep the size of what goes through them, biases of a tenth, norms about one."""
    weights = GpuWeights(config, dtype, torch.device(device))
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in weights.parts.items():
        if name.endswith("norm.weight"):
            tensor.uniform_(0.75, 1.25, generator=generator)
        elif name.endswith(".bias"):
            tensor.normal_(0, 0.1, generator=generator)
        else:
            tensor.normal_(0, tensor.shape[1] ** -0.5, generator=generator)
    return weights
