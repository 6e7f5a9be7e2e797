"""Finding, checking and loading model folders, and refusing what is broken."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_runtime.model.errors import ModelError
from gpu_runtime.model.safetensors_writer import SafetensorsWriter
from gpu_runtime.model.source import ModelFolder, open_folder, resolve_model
from gpu_runtime.model.tensors import read_header
from gpu_runtime.model.weights import Weights
from tests.tiny import make_tiny, save_tiny, save_tokenizer


def ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""


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


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"dtype": "F32", "shape": [48], "data_offsets": [0]},
        {"dtype": "F32", "shape": [48], "data_offsets": [0, 100]},
        {"dtype": "F32", "shape": [48], "data_offsets": [192, 0]},
        {"dtype": "F32", "shape": "48", "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [48], "data_offsets": ["0", "192"]},
        {"dtype": "I8", "shape": [48], "data_offsets": [0, 48]},
        {"dtype": ["F32"], "shape": [48], "data_offsets": [0, 192]},
    ],
)
def test_hostile_safetensors_headers(entry: object, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size]) | {"model.norm.weight": entry}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    with pytest.raises(ModelError):
        open_folder(tmp_path, "broken")


def test_a_sharded_bfloat16_folder(tmp_path: Path) -> None:
    """Loads as the values that bfloat16 keeps, whichever shard holds them."""
    model = make_tiny("llama").bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    save_tokenizer(tmp_path / "tokenizer.json", 300)
    folder = open_folder(tmp_path, "tiny")
    assert len(set(folder.tensors.file_of.values())) > 1
    weights = Weights(folder, lambda done, total: None)
    for name, tensor in model.state_dict().items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], tensor.float())


@pytest.mark.parametrize("files", [{}, {"a": "../../etc/passwd"}, {"a": 3}, [], {"a": ["x"]}])
def test_hostile_shard_index(files: object, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match="outside"):
        open_folder(tmp_path, "broken")


def test_float32_weights_are_mapped_not_copied(default_model: ModelFolder) -> None:
    """Half a gigabyte of weights takes no memory of its own: measured in a process that only loads them."""
    code = (
        "import sys; from pathlib import Path\n"
        "from gpu_runtime.model.source import open_folder; from gpu_runtime.model.weights import Weights\n"
        "def anonymous():\n"
        "    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('RssAnon'))\n"
        "folder = open_folder(Path(sys.argv[1]), ''); before = anonymous()\n"
        "weights = Weights(folder, lambda done, total: None)\n"
        "total = sum(float(weights[name].sum()) for name in folder.tensors.file_of)\n"
        "print(anonymous() - before)"
    )
    grown = run_python(code, str(default_model.path))
    assert int(grown) < 60_000  # KiB; the weights are 525,000


def test_resolving_a_model_needs_no_torch(tiny_folder: Path) -> None:
    code = (
        "import sys; from gpu_runtime.model.source import resolve_model\n"
        "resolve_model(sys.argv[1], lambda *_: None); print('torch' in sys.modules)"
    )
    assert run_python(code, str(tiny_folder)) == "False"


def run_python(code: str, argument: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
    return done.stdout.strip()


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


def test_the_default_model(default_model: ModelFolder) -> None:
    config = default_model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.rope_theta, config.max_position_embeddings) == (49152, 100000.0, 8192)
    assert config.tie_word_embeddings
    assert default_model.parameters == 134_515_008
    assert default_model.eos_token_ids == (2,)
