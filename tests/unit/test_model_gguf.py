"""Converting GGUF files, and refusing broken and unsupported ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gpu_runtime.model.errors import ModelError
from gpu_runtime.model.gguf import gguf_name, undo_permutation
from gpu_runtime.model.safetensors_writer import SafetensorsWriter
from gpu_runtime.model.source import ModelFolder, resolve_model


def ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""


def test_permutation_by_hand() -> None:
    """One head of 4 rows: GGUF keeps them as 0, 2, 1, 3 (pairs side by side), Hugging Face as halves."""
    stored = np.float32([[0], [2], [1], [3]])
    assert undo_permutation(stored, 1).ravel().tolist() == [0, 1, 2, 3]


def test_gguf_names() -> None:
    assert gguf_name("model.layers.12.self_attn.q_proj.weight") == "blk.12.attn_q.weight"
    assert gguf_name("lm_head.weight") == "output.weight"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file" * 100])
def test_garbage_gguf(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="GGUF"):
        resolve_model(str(tmp_path / "bad.gguf"), ignore)
    assert list((tmp_path / "cache").iterdir()) == []


def test_truncated_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_runtime.model.source import _default_gguf

    monkeypatch.setenv("BLINK_CACHE", str(tmp_path / "cache"))
    for size in (1000, 1 << 20, 8 << 20):
        with _default_gguf().open("rb") as file:
            (tmp_path / "cut.gguf").write_bytes(file.read(size))
        with pytest.raises(ModelError):
            resolve_model(str(tmp_path / "cut.gguf"), ignore)


# transformers leaves the splitting of digits out of its import. The vocabulary has no token of several digits, so the
# ids are the same even for numbers.
TEXTS = ["Hello, world!", "naïve café ☕ 日本語", "def f(x):\n\treturn x  # ok", "2024-12-31", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_equals_the_import_of_transformers(default_model: ModelFolder, text: str) -> None:
    from tokenizers import Tokenizer

    from gpu_runtime.model.source import _default_gguf

    tokenizer = Tokenizer.from_file(str(default_model.path / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert ids == reference_tokenizer(_default_gguf())(text, add_special_tokens=False).input_ids


@cache
def reference_tokenizer(path: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def make_gguf(path: Path, leave_out: str = "", **fields: object) -> Path:
    """A GGUF file with a tiny Llama's metadata and no tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, str(fields.get("architecture", "llama")))
    numbers = {
        "context_length": 128,
        "embedding_length": 16,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention.head_count": 2,
    }
    for name, value in numbers.items():
        if name != leave_out:
            writer.add_uint32(f"llama.{name}", int(fields.get(name, value)))  # type: ignore[call-overload]
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", str(fields.get("model", "gpt2")))
    writer.add_string("tokenizer.ggml.pre", str(fields.get("pre", "smollm")))
    if leave_out != "tokens":
        writer.add_array("tokenizer.ggml.tokens", fields.get("tokens", ["a", "b", "ab"]))
    writer.add_array("tokenizer.ggml.merges", fields.get("merges", ["a b"]))
    writer.add_uint32("tokenizer.ggml.eos_token_id", int(fields.get("eos", 2)))  # type: ignore[call-overload]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "lacks the tensor token_embd.weight"),
        ({"architecture": "gemma3"}, "architecture 'gemma3'"),
        ({"model": "llama"}, "tokenizer 'llama'"),
        ({"pre": "mpt"}, "pre-tokenizer 'mpt'"),
        ({"leave_out": "block_count"}, "block_count"),
        ({"leave_out": "tokens"}, "damaged"),
        ({"attention.head_count": 0}, "damaged|head_count|positive"),
        ({"tokens": ["a", "a", "b"]}, "twice"),
        ({"merges": ["a zzz"]}, "damaged"),
        ({"merges": ["ab"]}, "damaged"),
    ],
)
def test_gguf_that_is_not_supported(fields: dict, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_CACHE", str(tmp_path / "cache"))
    path = make_gguf(tmp_path / "tiny.gguf", **fields)
    with pytest.raises(ModelError, match=word):
        resolve_model(str(path), ignore)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_undoing_the_permutation_the_default_model_is_lost(default_model: ModelFolder, tmp_path: Path) -> None:
    """The negative of the greedy tests: queries and keys in GGUF's order give another answer, at the right shapes."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    from tests.models import driver

    tensors = load_file(default_model.path / "model.safetensors")
    for name, weight in tensors.items():
        heads = 9 if name.endswith("q_proj.weight") else 3 if name.endswith("k_proj.weight") else 0
        if heads:  # back to the order in the file
            halves = weight.reshape(heads, 2, 32, 576)
            tensors[name] = halves.swapaxes(1, 2).reshape(weight.shape)
    with SafetensorsWriter(tmp_path / "model.safetensors", {n: t.shape for n, t in tensors.items()}) as writer:
        for name, weight in tensors.items():
            writer.write(name, weight)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((default_model.path / name).read_bytes())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is Paris, and the capital of Germany is").ids
    assert " Berlin" in tokenizer.decode(driver(default_model.path).generate({0: ids}, 4)[0])
    assert "Berlin" not in tokenizer.decode(driver(tmp_path).generate({0: ids}, 4)[0])
