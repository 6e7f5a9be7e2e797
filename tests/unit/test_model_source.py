"""Finding, checking and converting models, and refusing what is broken."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gpu_runtime.model.config import ModelConfig, eos_token_ids
from gpu_runtime.model.errors import ModelError
from gpu_runtime.model.gguf import gguf_name, undo_permutation
from gpu_runtime.model.safetensors_writer import SafetensorsWriter
from gpu_runtime.model.source import ModelFolder, open_folder, resolve_model
from gpu_runtime.model.tensors import read_header
from tests.tiny import save_tiny

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture"),
        ({"architectures": None}, "architecture"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "share"),
        ({"head_dim": 12}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding"),
    ],
)
def test_config_refuses(change: dict, word: str) -> None:
    with pytest.raises(ModelError, match=word):
        ModelConfig.from_dict(LLAMA | change)


def test_config_defaults() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (16, 4, 10000.0)
    assert not config.tie_word_embeddings


def test_every_stop_token_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    assert eos_token_ids(tmp_path, 100) == (3, 7, 9)
    with pytest.raises(ModelError, match="vocabulary"):
        eos_token_ids(tmp_path, 8)


def test_sources_that_are_nothing(tmp_path: Path) -> None:
    for source in (str(tmp_path / "absent"), "no-such-model", ""):
        with pytest.raises(ModelError):
            resolve_model(source, ignore)


def test_a_folder_loads_by_path(tiny_folder: Path) -> None:
    model = resolve_model(str(tiny_folder), ignore)
    assert model.config.num_attention_heads == 6
    assert model.eos_token_ids == (2,)
    # embeddings and head 2·300·48; a layer: q 96·48, k and v 32·48 each, o 48·96, three of 80·48, two norms of 48
    assert model.parameters == 2 * 300 * 48 + 2 * (2 * 96 * 48 + 2 * 32 * 48 + 3 * 80 * 48 + 2 * 48) + 48


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_lacks_a_file(missing: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        open_folder(tmp_path, "broken")


def test_a_folder_lacks_a_tensor_or_has_another_shape(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    for change, word in (({"num_hidden_layers": 3}, "missing"), ({"intermediate_size": 96}, "shape")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=word):
            open_folder(tmp_path, "broken")


def test_damaged_safetensors(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (whole[:-100], b"", b"\xff" * 64, struct.pack("<Q", 1 << 62) + b"{}"):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ModelError):
            open_folder(tmp_path, "broken")


def test_writer_makes_files_that_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.float32([1.5])
    with SafetensorsWriter(tmp_path / "t.safetensors", {"a": (2, 3), "b": (1,)}) as writer:
        writer.write("a", first)
        writer.write("b", second)
    loaded = load_file(tmp_path / "t.safetensors")
    assert np.array_equal(loaded["a"], first)
    assert np.array_equal(loaded["b"], second)
    assert read_header(tmp_path / "t.safetensors")["b"]["data_offsets"] == [24, 28]


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


def test_the_default_model(default_model: ModelFolder) -> None:
    config = default_model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.rope_theta, config.max_position_embeddings) == (49152, 100000.0, 8192)
    assert config.tie_word_embeddings
    assert default_model.parameters == 134_515_008
    assert default_model.eos_token_ids == (2,)


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
