"""Converts a GGUF file, once, into a Hugging Face folder in the cache: float32 safetensors, config, tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.errors import ModelError
from gpu_runtime.model.gguf_config import build_config
from gpu_runtime.model.gguf_tokenizer import build_tokenizer, tokenizer_config
from gpu_runtime.model.safetensors_writer import SafetensorsWriter
from gpu_runtime.model.tensors import expected_shapes

Progress = Callable[[int, int, str], None]

CONVERTER_VERSION = 1
"""Part of the cache key: raise it when the converter's output changes."""

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def cache_folder() -> Path:
    """Where converted models are kept: $BLINK_CACHE, or `blink` in the user's cache folder."""
    if chosen := os.environ.get("BLINK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blink"


def convert_gguf(path: Path, progress: Progress) -> Path:
    """The folder with the converted model; quick when it was converted before.

    Raises:
        ModelError: not a GGUF file, unsupported, or the cache cannot be written.
    """
    target = cache_folder() / f"{path.stem.lower()}-{_fingerprint(path)}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    except OSError as error:
        raise ModelError(f"the cache {target.parent} cannot be written: {error}; set BLINK_CACHE") from error
    try:
        _convert(path, scratch, progress)
        if not target.exists():
            scratch.rename(target)
    except OSError as error:
        if not (target / "config.json").is_file():  # else another process was faster
            raise ModelError(f"the cache {target.parent} cannot be written: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fingerprint(path: Path) -> str:
    """Size, first and last 4 MiB of the file, and the converter's version: enough to tell files apart."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION} ".encode())
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{size} ".encode() + file.read(4 << 20))
            file.seek(max(0, size - (4 << 20)))
            digest.update(file.read())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def _convert(path: Path, folder: Path, progress: Progress) -> None:
    progress(0, 0, "reading the GGUF file")
    fields, tensors = _read(path)
    raw_config = _write_metadata(path, folder, fields, set(tensors))
    config = ModelConfig.from_dict(raw_config)
    shapes = expected_shapes(config)
    undo = raw_config["model_type"] == "llama"
    with SafetensorsWriter(folder / "model.safetensors", shapes) as writer:
        for done, (name, shape) in enumerate(shapes.items()):
            progress(done, len(shapes), "dequantising")
            writer.write(name, _tensor(tensors, name, shape, config, undo))
    # Last: its presence says that the folder is whole.
    _write_json(folder / "config.json", raw_config)


def _write_metadata(path: Path, folder: Path, fields: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    """Writes all but config.json, whose content it returns."""
    try:
        raw_config = build_config(fields, tensor_names)
        build_tokenizer(fields).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    except (ModelError, OSError):
        raise
    # A field that is missing or of another kind than its name promises; `tokenizers` raises plain Exceptions.
    except Exception as error:
        raise ModelError(f"the metadata of {path} is damaged: {error!r}") from error
    _write_json(folder / "generation_config.json", {"eos_token_id": raw_config["eos_token_id"]})
    return raw_config


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    # The reader raises nearly anything on a damaged file: struct, index, value and Unicode errors were seen.
    except Exception as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


def _tensor(
    tensors: dict[str, Any], name: str, shape: tuple[int, ...], config: ModelConfig, undo: bool
) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    theirs = gguf_name(name)
    if theirs not in tensors:
        raise ModelError(f"the GGUF file lacks the tensor {theirs}")
    tensor = tensors[theirs]
    try:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"GGUF tensor {theirs} of type {tensor.tensor_type.name} cannot be read: {error}") from error
    if values.shape != shape:
        raise ModelError(f"GGUF tensor {theirs} has shape {list(values.shape)}, not {list(shape)}")
    if undo and name.endswith("q_proj.weight"):
        return undo_permutation(values, config.num_attention_heads)
    if undo and name.endswith("k_proj.weight"):
        return undo_permutation(values, config.num_key_value_heads)
    return values


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def undo_permutation(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection [rows, columns] back in Hugging Face's order.

    Llama GGUF files keep the two halves of each head's rotary pairs interleaved.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
