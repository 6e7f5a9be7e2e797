"""The GPU's layers: each Triton kernel against plain torch, and whole models against transformers.

On a machine without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from gpu_runtime.kernels.attention import RopeTables
from gpu_runtime.kernels.gpu.gated import reference_silu_mul, silu_mul
from gpu_runtime.kernels.gpu.norm import gather_norm, reference_norm, rms_norm
from gpu_runtime.kernels.gpu.rope_store import HeadNorms, reference_rope_store, rope_store
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.gpu_weights import load_weights, random_weights
from gpu_runtime.model.source import open_folder
from gpu_runtime.model.tensors import expected_shapes
from tests.attention_cases import Case, mend_interpreter
from tests.device_plans import DeviceDriver, Known, PlanSizes, ScheduledDriver
from tests.fused_attention_cases import attend_fused, build_raw
from tests.random_models import random_model, take_weights, whole_logits
from tests.tiny import LLAMA3_ROPE, SIZES, make_tiny, save_tokenizer
from tests.unit.test_model_config import LLAMA

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    mend_interpreter()
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 1e-2}
"""A rounding of bfloat16 is 2^-9 at most, and norms have two; Triton's interpreter cuts off, which is 2^-8."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 576, 896, 3072])
def test_norms(size: int, dtype: torch.dtype) -> None:
    inputs, weight = random(5, size, dtype=dtype) * 10, random(size, dtype=dtype)
    expected = reference_norm(inputs, weight, 1e-5)
    assert relative(rms_norm(inputs, weight, 1e-5), expected) < TOLERANCE[dtype]
    wide = inputs.double() * (inputs.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert relative(expected, wide) < TOLERANCE[dtype]


def test_gathered_rows_out_of_range_go_to_the_nearest() -> None:
    inputs, weight = random(4, 64), random(64)
    records = torch.tensor([[3, 9], [0, 9], [-7, 9], [4, 9], [1 << 30, 9], [2, 9]], dtype=torch.int32, device=DEVICE)
    normed = gather_norm(inputs, records[:, 0], weight, 1e-5)
    assert torch.equal(normed, rms_norm(inputs, weight, 1e-5)[[3, 0, 0, 3, 3, 2]])


def test_norm_of_a_row_that_is_not_a_number_stays_in_its_row() -> None:
    inputs, weight = random(3, 64), random(64)
    inputs[1, 5] = float("nan")
    normed = rms_norm(inputs, weight, 1e-5)
    assert normed[1].isnan().all()
    assert normed[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [24, 1536, 2500])
def test_silu_mul(inner: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * inner, dtype=dtype) * 5
    assert relative(silu_mul(gate_up), reference_silu_mul(gate_up)) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_silu_of_extreme_gates() -> None:
    gate_up = torch.tensor([[1e30, -1e30, 0.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert torch.equal(silu_mul(gate_up), torch.tensor([[2e30, 0.0, 0.0]], device=DEVICE))


HEADS = [(9, 3, 64), (3, 3, 80), (4, 1, 96), (4, 2, 128), (2, 1, 256), (32, 8, 128), (4, 2, 16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_rope_store(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    """Everything that the kernel may not touch keeps its bits: other slots, and keys and values of the fused row."""
    tokens, blocks = 5, 4
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(40, dim // 2, device=DEVICE) * 7
    tables = RopeTables(angles.cos(), angles.sin())
    positions = torch.tensor([39, 0, 7, 21, 0, 99], dtype=torch.int32, device=DEVICE)
    kv_slots = torch.tensor([63, 16, 5, 44, 0, 99], dtype=torch.int32, device=DEVICE)
    norms = HeadNorms(random(dim, dtype=dtype), random(dim, dtype=dtype), 1e-6) if normed else None
    keys, values = (random(blocks, kv_heads, 16, dim, dtype=dtype) for _ in range(2))
    expected = [tensor.clone() for tensor in (qkv, keys, values)]
    reference_rope_store(expected[0], positions, kv_slots, tables, norms, *expected[1:])
    rope_store(qkv, positions, kv_slots, tables, norms, keys, values)
    assert torch.equal(values, expected[2])
    for actual, wanted in ((qkv, expected[0]), (keys, expected[1])):
        assert relative(actual, wanted) < TOLERANCE[dtype]
    written = torch.zeros(blocks * 16, dtype=torch.bool, device=DEVICE)
    written[kv_slots[:tokens].long()] = True
    untouched = ~written.view(blocks, 1, 16).expand(-1, kv_heads, -1)
    assert torch.equal(keys[untouched], expected[1][untouched])
    assert torch.equal(qkv[:, heads * dim :], expected[0][:, heads * dim :])


def test_rotation_by_hand() -> None:
    """A quarter turn sends (first, second) to (−second, first); position 0 turns nothing."""
    tables = RopeTables(torch.tensor([[1.0] * 4, [0.0] * 4]), torch.tensor([[0.0] * 4, [1.0] * 4]))
    tables = RopeTables(tables.cosines.to(DEVICE), tables.sines.to(DEVICE))
    qkv = torch.arange(1.0, 25.0, device=DEVICE).repeat(2, 1)
    keys, values = (torch.zeros(2, 1, 2, 8, device=DEVICE) for _ in range(2))
    at = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    rope_store(qkv, at, at + 2, tables, None, keys, values)
    assert qkv[:, :8].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [-5, -6, -7, -8, 1, 2, 3, 4]]
    assert keys[1, 0].tolist() == [[9, 10, 11, 12, 13, 14, 15, 16], [-13, -14, -15, -16, 9, 10, 11, 12]]
    assert values[1, 0].tolist() == [list(range(17, 25))] * 2
    assert not keys[0].any()
    assert not values[0].any()


def test_random_weights_have_every_tensor_and_fused_views() -> None:
    config = ModelConfig.from_dict(LLAMA | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True})
    weights = random_weights(config, torch.bfloat16, 7, DEVICE)
    assert {name: tuple(part.shape) for name, part in weights.parts.items()} == expected_shapes(config)
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    for kind, fused in (("weight", weights.layers[0].qkv.weight), ("bias", weights.layers[0].qkv.bias)):
        assert fused is not None
        assert torch.equal(fused, torch.cat([weights.parts[f"{name}.{kind}"] for name in names]))
    again = random_weights(config, torch.bfloat16, 7, DEVICE)
    assert all(torch.equal(part, again.parts[name]) for name, part in weights.parts.items())
    assert not torch.equal(weights.head, random_weights(config, torch.bfloat16, 8, DEVICE).head)


def test_weights_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        random_weights(ModelConfig.from_dict(LLAMA), torch.float16, 0, DEVICE)


def test_loading_a_folder(tmp_path: Path) -> None:
    """Stored as float32 in several files; taken as it is, and as bfloat16."""
    model = make_tiny("llama tied")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    save_tokenizer(tmp_path / "tokenizer.json", SIZES["vocab_size"])
    folder = open_folder(tmp_path, "tiny")
    assert len(set(folder.tensors.file_of.values())) > 1
    for dtype in DTYPES:
        seen: list[tuple[int, int]] = []
        weights = load_weights(folder, dtype, lambda done, total, seen=seen: seen.append((done, total)), DEVICE)
        assert seen == [(done, len(weights.parts)) for done in range(1, len(weights.parts) + 1)]
        assert weights.head is weights.embedding
        for name, part in weights.parts.items():
            assert torch.equal(part.cpu(), model.state_dict()[name].to(dtype))


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "mistral": ("Mistral", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
SMALL = PlanSizes(max_running=3, tokens=24, slots=4, columns=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_against_transformers(family: str) -> None:
    """Two prompts in chunks, then a decode beside a chunk, then decodes alone, with padding and without."""
    name, changes = FAMILIES[family]
    model = random_model(name, 3, **changes)
    driver = DeviceDriver(*take_weights(model, torch.float32, DEVICE), SMALL)
    first, second = torch.randint(3, 300, (25,)).tolist(), torch.randint(3, 300, (40,)).tolist()
    wholes = {0: whole_logits(model, first), 2: whole_logits(model, second)}
    steps: list[tuple[dict[int, list[int]], int]] = [
        ({0: first[:9], 2: second[:14]}, 24),
        ({0: first[9:23], 2: second[14:21]}, 24),
        ({0: first[23:24], 2: second[21:38]}, 20),
        ({0: first[24:25], 2: second[38:39]}, 3),
        ({2: second[39:40]}, 1),
    ]
    for pieces, bucket in steps:
        logits = driver.step(pieces, bucket)
        assert logits.shape == (min(bucket, SMALL.max_running), SIZES["vocab_size"])
        expected = [wholes[slot][driver.lengths[slot] - 1] for slot in pieces]
        assert relative(logits[: len(pieces)].cpu(), torch.stack(expected)) < 1e-4


def test_decodes_alone_with_rotation_within_attention_and_in_front() -> None:
    """Head norms too: the same logits, and the same tokens seen by the step after."""
    config, weights = take_weights(random_model("Qwen3", 4, head_dim=32), torch.float32, DEVICE)
    fused, apart = (DeviceDriver(config, weights, SMALL, fuse=fuse) for fuse in (True, False))
    steps = [({0: [5, 6, 7], 1: [8, 9]}, 8), ({1: [10], 0: [11]}, 3), ({0: [12], 1: [13]}, 2), ({0: [14, 15, 16]}, 4)]
    for pieces, bucket in steps:
        logits = [driver.step(pieces, bucket)[: len(pieces)] for driver in (fused, apart)]
        assert relative(*logits) < 1e-5


def test_fused_attention_refuses_what_it_would_misread() -> None:
    case = Case("refused", 64, 2, 1, (5, 6))
    raw = build_raw(case, DEVICE, normed=True)
    tables, norms = raw.tables, raw.norms
    assert norms is not None
    short = RopeTables(tables.cosines[:, 1:], tables.sines[:, 1:])
    wide = HeadNorms(norms.query.repeat(2), norms.key, norms.epsilon)
    queries = replace(raw.step, fused=raw.step.queries)
    changed = {
        "rotary tables": replace(raw, tables=short),
        "norms of heads": replace(raw, norms=wide),
        "rows of queries": replace(raw, step=queries),
    }
    for message, wrong in changed.items():
        with pytest.raises(ValueError, match=message):
            attend_fused(wrong)


def test_a_model_driven_by_the_scheduler() -> None:
    """More sequences than may run at a time, prompts longer than a step, and some with logits of all their tokens."""
    model = random_model("Llama", 5)
    sizes = PlanSizes(max_running=2, tokens=16, slots=4, columns=2)
    driver = ScheduledDriver(*take_weights(model, torch.float32, DEVICE), sizes, [1, 2, 16], blocks=5)
    shapes = ((23, 20, False), (5, 3, False), (9, 7, True), (6, 6, True))
    sequences = [Known(torch.randint(3, 300, (size,)).tolist(), prompt, scored) for size, prompt, scored in shapes]
    found = driver.run(sequences)
    assert {(s, p) for s, known in enumerate(sequences) for p in known.positions} == set(found)
    wholes = [whole_logits(model, known.tokens) for known in sequences]
    for (sequence, position), logits in found.items():
        assert relative(logits, wholes[sequence][position - 1]) < 1e-4
    assert any(decodes and chunks for _, decodes, chunks in driver.steps)
