"""Names and shapes of the tensors that a model needs, and where a safetensors folder keeps them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gpu_runtime.model.config import ModelConfig, read_json, refuse_unless_file
from gpu_runtime.model.errors import ModelError

DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 << 20


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape ([out, in] for matrices) of every tensor."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config):
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    linears = [
        ("self_attn.q_proj", queries, hidden, config.qkv_bias),
        ("self_attn.k_proj", keys, hidden, config.qkv_bias),
        ("self_attn.v_proj", keys, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, queries, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    for name, rows, columns, bias in linears:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)


@dataclass(frozen=True)
class TensorFiles:
    """Which file of a folder holds which tensor."""

    file_of: dict[str, Path]

    @classmethod
    def find(cls, folder: Path, config: ModelConfig) -> TensorFiles:
        """Checks, by the files' headers alone, that every needed tensor is there.

        Raises:
            ModelError: a tensor or file is missing, or has another shape or an unsupported type.
        """
        headers = {path: read_header(path) for path in _files(folder)}
        found = {name: path for path, header in headers.items() for name in header}
        for name, shape in expected_shapes(config).items():
            if name not in found:
                raise ModelError(f"{folder}: tensor {name} is missing")
            _check_entry(folder, name, headers[found[name]][name], shape)
        return cls({name: found[name] for name in expected_shapes(config)})


def _check_entry(folder: Path, name: str, entry: dict[str, Any], shape: tuple[int, ...]) -> None:
    dtype = entry["dtype"]
    if dtype not in DTYPES:
        raise ModelError(f"{folder}: {name} has type {dtype}; supported: {', '.join(DTYPES)}")
    if entry["shape"] != list(shape):
        raise ModelError(f"{folder}: {name} has shape {entry['shape']}, not {list(shape)}")
    begin, end = entry["data_offsets"]
    if end - begin != prod(shape) * DTYPES[dtype]:
        raise ModelError(f"{folder}: {name} takes {end - begin} bytes, which its shape does not")


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    files = read_json(index).get("weight_map")
    names = set(files.values()) if isinstance(files, dict) and all(map(_is_plain_name, files.values())) else set()
    if not names:
        raise ModelError(f"{index} names no files, or files outside its folder")
    return [folder / name for name in sorted(names)]


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and "/" not in name and not name.startswith(".")


def read_header(path: Path) -> dict[str, Any]:
    """Type, shape and place of every tensor: 8 bytes of length, then JSON (format: safetensors' own documentation).

    Raises:
        ModelError: not such a file.
    """
    refuse_unless_file(path)
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError("header too large")
            header = json.loads(file.read(size))
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not all(map(_is_entry, entries.values())):
        raise ModelError(f"{path} is not a safetensors file: its header describes no tensors")
    _check_extent(path, entries, 8 + size)
    return entries


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(isinstance(size, int) and size >= 0 for size in shape + offsets) and offsets[0] <= offsets[1]


def _check_extent(path: Path, entries: dict[str, Any], data_start: int) -> None:
    """A truncated file would only fault when its last page is touched."""
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    if data_start + max(ends, default=0) > path.stat().st_size:
        raise ModelError(f"{path} is truncated")
