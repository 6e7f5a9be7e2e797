"""The layers on a CUDA device against transformers on the same device: random models of every family, and SmolLM2."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from gpu_runtime.kernels.attention import RopeTables
from gpu_runtime.kernels.gpu.rope_store import rope_store
from gpu_runtime.model.gpu_weights import load_weights, random_weights
from gpu_runtime.model.source import open_folder
from tests.device_plans import DeviceDriver, Known, PlanSizes, ScheduledDriver
from tests.random_models import random_model, take_weights, whole_logits

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""‖logits − float32 logits‖ / ‖float32 logits‖, with the same weights."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama gqa 64": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}),
    "llama tied 80": ("Llama", {"head_dim": 80, "tie_word_embeddings": True}),
    "llama biased mha": (
        "Llama",
        {"num_key_value_heads": 6, "head_dim": 64, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral mqa 128": ("Mistral", {"num_key_value_heads": 1, "head_dim": 128}),
    "qwen2 three heads 64": ("Qwen2", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}),
    "qwen3 128": ("Qwen3", {"num_attention_heads": 4, "head_dim": 128}),
    "qwen3 tied 96": ("Qwen3", {"head_dim": 96, "tie_word_embeddings": True}),
}
COMMON = {"vocab_size": 1000, "hidden_size": 384, "intermediate_size": 1056, "num_hidden_layers": 3}
SIZES = PlanSizes(max_running=6, tokens=256, slots=8, columns=32)


def device_model(name: str, dtype: torch.dtype) -> Any:
    """A random transformers model, as `rounded` makes it."""
    family, changes = MODELS[name]
    return rounded(random_model(family, 11, **COMMON | changes, attn_implementation="eager"), dtype)


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """The model on the device, in float32 with its weights rounded to `dtype`, but not its rotary frequencies."""
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model.to("cuda")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, COMMON["vocab_size"], (count,)).tolist()


CASES = [(name, torch.float32) for name in MODELS]
CASES += [(name, torch.bfloat16) for name in ("llama gqa 64", "llama tied 80", "mistral mqa 128", "qwen3 128")]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_chunks_and_decodes(name: str, dtype: torch.dtype) -> None:
    """Prompts in chunks, decodes beside a chunk, decodes alone; with padding and without."""
    model = device_model(name, dtype)
    driver = DeviceDriver(*take_weights(model, dtype, "cuda"), SIZES)
    tokens = {0: random_tokens(140), 3: random_tokens(400), 7: random_tokens(76)}
    wholes = {slot: whole_logits(model, ids) for slot, ids in tokens.items()}
    steps = [
        ({0: 130, 3: 70}, 256),
        ({0: 2, 3: 180, 7: 74}, 256),
        ({0: 1, 7: 1, 3: 146}, 160),
        ({3: 1, 0: 1, 7: 1}, 4),
        ({0: 1, 3: 1}, 2),
        ({3: 1}, 1),
    ]
    got, expected = [], []
    for counts, bucket in steps:
        pieces = {slot: tokens[slot][driver.lengths[slot] :][:count] for slot, count in counts.items()}
        logits = driver.step(pieces, bucket)
        assert logits.shape == (min(bucket, SIZES.max_running), COMMON["vocab_size"])
        assert logits.dtype == torch.float32
        got.append(logits[: len(pieces)])
        expected.append(torch.stack([wholes[slot][driver.lengths[slot] - 1] for slot in pieces]))
    assert relative(torch.cat(got), torch.cat(expected)) < TOLERANCE[dtype]
    for actual, wanted in zip(got, expected, strict=True):
        assert relative(actual, wanted) < 2 * TOLERANCE[dtype]


@pytest.mark.skipif(find_spec("gpu_runtime._host_scheduler") is None, reason="the host's scheduler is not built")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_driven_by_the_scheduler(dtype: torch.dtype) -> None:
    """Sixteen sequences, six of them at a time, tokens given beforehand, two with logits of the prompt too; every
    position that has logits is compared."""
    model = device_model("llama gqa 64", dtype)
    config, weights = take_weights(model, dtype, "cuda")
    driver = ScheduledDriver(config, weights, SIZES, [1, 2, 4, 8, 64, 256], blocks=150)
    torch.manual_seed(2)
    sizes = [(torch.randint(1, 380, ()).item(), torch.randint(1, 20, ()).item()) for _ in range(16)]
    sequences = [
        Known(random_tokens(int(prompt + more)), int(prompt), scored=index % 8 == 5)
        for index, (prompt, more) in enumerate(sizes)
    ]
    found = driver.run(sequences)
    assert len(found) == sum(len(known.positions) for known in sequences)
    assert any(decodes and chunks for _, decodes, chunks in driver.steps)
    assert any(not chunks for _, _, chunks in driver.steps)
    wholes = [whole_logits(model, known.tokens).cpu() for known in sequences]
    for (sequence, position), logits in found.items():
        assert relative(logits, wholes[sequence][position - 1]) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("decode_only", [True, False])
def test_a_captured_step_follows_the_plan(decode_only: bool) -> None:
    """A graph captured on one plan, of kernels that overlap, gives bit by bit what the step gives on another plan when
    each kernel awaits the one in front."""
    model = device_model("qwen3 128", torch.bfloat16)
    config, weights = take_weights(model, torch.bfloat16, "cuda")
    in_turn, replayed = (DeviceDriver(config, weights, SIZES, overlap) for overlap in (False, True))
    prompts = {slot: random_tokens(40 + 9 * slot) for slot in range(3)}
    for driver in (in_turn, replayed):
        driver.step(prompts, 256)
    bucket = 4 if decode_only else 64
    for part in (replayed.device_plan.header, replayed.device_plan.kv_slots):
        part.zero_()  # the step that warms up is one of padding: into the scratch block
    replayed.model.forward(bucket, decode_only)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = replayed.model.forward(bucket, decode_only)
    for _ in range(10):
        pieces = {slot: random_tokens(1 if decode_only or slot < 2 else 30) for slot in range(3)}
        replayed.put(pieces, bucket)
        graph.replay()
        assert torch.equal(captured[:3], in_turn.step(pieces, bucket)[:3])


def test_stale_rows_and_padding_harm_nobody() -> None:
    """Row indexes out of range, and padding in every bucket, leave the real rows as they are."""
    model = device_model("llama gqa 64", torch.float32)
    driver = DeviceDriver(*take_weights(model, torch.float32, "cuda"), SIZES)
    driver.device_plan.rows[:, 0] = 1 << 30
    driver.device_plan.rows[1, 0] = -5
    tokens = random_tokens(50)
    logits = driver.step({2: tokens}, 256)
    assert relative(logits[0], whole_logits(model, tokens)[-1]) < TOLERANCE[torch.float32]
    assert logits.isfinite().all()


def test_slots_far_into_a_large_cache() -> None:
    """Offsets beyond 2^31 elements."""
    blocks, kv_heads, dim = 140_000, 8, 128
    keys, values = (torch.zeros(blocks, kv_heads, 16, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert keys.numel() > 1 << 31
    qkv = torch.randn(2, 3 * kv_heads * dim, device="cuda").bfloat16()
    tables = RopeTables(torch.ones(1, dim // 2, device="cuda"), torch.zeros(1, dim // 2, device="cuda"))
    positions, last = torch.zeros(2, dtype=torch.int32, device="cuda"), blocks * 16 - 1
    slots = torch.tensor([last, 7], dtype=torch.int32, device="cuda")
    rope_store(qkv, positions, slots, tables, None, keys, values)
    _, expected_keys, expected_values = qkv.view(2, 3, kv_heads, dim).unbind(1)
    for row, (block, place) in enumerate(((blocks - 1, 15), (0, 7))):
        assert torch.equal(keys[block, :, place], expected_keys[row])
        assert torch.equal(values[block, :, place], expected_values[row])
    assert int(keys.any(-1).sum()) == 2 * kv_heads


def test_random_weights_keep_activations_sane() -> None:
    """So that measurements do not run on infinities."""
    config, _ = take_weights(random_model("Llama", 1, **COMMON | {"num_hidden_layers": 12}), torch.bfloat16, "cuda")
    driver = DeviceDriver(config, random_weights(config, torch.bfloat16, 3), SIZES)
    logits = driver.step({0: random_tokens(200)}, 256)[0]
    assert 0.2 < float(logits.std()) < 5


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_smollm2(dtype: torch.dtype, real_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32, attn_implementation="eager")
    reference = rounded(reference.eval(), dtype)
    folder = open_folder(real_model, "smollm2")
    weights = load_weights(folder, dtype, lambda done, total: None)
    driver = DeviceDriver(folder.config, weights, SIZES)
    ids = torch.arange(3, 303).mul(7919).remainder(folder.config.vocab_size).tolist()
    whole = whole_logits(reference, ids)
    for count, bucket in ((200, 256), (90, 96), (1, 1), (1, 4)):
        logits = driver.step({1: ids[driver.lengths[1] :][:count]}, bucket)
        assert relative(logits[0], whole[driver.lengths[1] - 1]) < 3 * TOLERANCE[dtype]  # thirty layers
