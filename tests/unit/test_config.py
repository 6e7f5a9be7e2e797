"""What an operator may choose, what follows from it, and how what cannot work is refused before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_runtime.config import ConfigError, ModelLimits, make_config, scheduler_config, step_buckets
from gpu_runtime.control import device_check, memory
from gpu_runtime.control.device_check import require_device
from gpu_runtime.control.errors import BadRequestError, ExhaustedError
from gpu_runtime.control.memory import DeviceUse, fit_memory, token_bytes
from gpu_runtime.control.prepare import prepare
from gpu_runtime.cuda.device import Device, first_device
from gpu_runtime.cuda.errors import CudaError
from gpu_runtime.cuda.occupancy import free_bytes
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.source import ModelFolder
from gpu_runtime.model.tensors import TensorFiles
from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.ways import Wish

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
WINDOW = 131072
# Attention's four matrices, the three of the feed-forward part and two norms, 32 times; embedding, head and last norm.
PARAMETERS_8B = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 2 * 128256 * 4096 + 4096
# A cosine and a sine of 64 angles for each position.
ROTARY_8B = 131072 * 64 * 2 * 4
# Logits of 256 rows; 512 tokens of 67,584 numbers; tokens of 512 sequences; each twice. 3 GiB for everything else.
BESIDE_8B = ROTARY_8B + 2 * 256 * 128256 * 4 + 2 * 512 * 67584 * 2 + 2 * 512 * 131072 * 4 + 3 * 2**30


def model(**changes: object) -> ModelFolder:
    """A model of which only the configuration is there."""
    return ModelFolder(Path("nowhere"), "model", ModelConfig.from_dict(LLAMA_8B | changes), (2,), TensorFiles({}))


def has_device() -> bool:
    try:
        return bool(first_device())
    except CudaError:
        return False


def test_what_is_left_open_follows_the_device() -> None:
    soft, cuda = make_config("cpu"), make_config("cuda")
    names = ("device", "dtype", "kv_tokens", "token_budget", "max_running", "max_sequences")
    assert [getattr(soft, name) for name in names] == ["cpu", "float32", 16384, 128, 64, 256]
    assert [getattr(cuda, name) for name in names] == ["cuda", "bfloat16", 0, 512, 256, 512]
    assert make_config("cuda", dtype="", kv_tokens=0, max_running=None) == cuda


def test_rdma_wants_an_interface_that_is_declared_private() -> None:
    with pytest.raises(ConfigError, match="--rdma-address"):
        make_config("cpu", transports=("shm", "verbs"))
    with pytest.raises(ConfigError, match="knows no 'pigeon', ''; there are: shm, verbs, doca"):
        make_config("cpu", transports=("shm", "pigeon", ""), rdma_address="10.9.0.1")
    assert make_config("cpu", transports=("verbs",), rdma_address="10.9.0.1").transports == ("verbs",)
    made = make_config("cuda", transports=("shm", "doca"), rdma_address="10.9.0.1")
    assert (made.uses_rdma, made.serves_local) == (True, True)
    assert not make_config("cuda", transports=("verbs",), rdma_address="10.9.0.1").serves_local


def test_choices_count() -> None:
    made = make_config("cuda", dtype="float32", kv_tokens=4096, memory_share=0.5, random_weights=True, channels=3)
    assert (made.dtype, made.kv_tokens, made.memory_share, made.random_weights) == ("float32", 4096, 0.5, True)
    assert made.arena_sizes().channels == 3


def test_a_step_and_the_table_hold_what_runs() -> None:
    """Each running sequence needs a token of the step and a place among the sequences."""
    made = make_config("cpu", max_running=300)
    assert (made.token_budget, made.max_running, made.max_sequences) == (300, 300, 300)


@pytest.mark.parametrize(
    ("device", "choices", "words"),
    [
        ("tpu", {}, "'tpu' is unknown; there are: cpu, cuda"),
        ("", {}, "'' is unknown"),
        ("cuda", {"dtype": "float16"}, "'float16' is unknown; there are: float32, bfloat16"),
        ("cpu", {"dtype": "bfloat16"}, "the soft GPU computes in float32"),
        ("cpu", {"random_weights": True}, "a model's own weights"),
    ],
)
def test_refused_choices(device: str, choices: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(device, **choices)


def test_step_buckets() -> None:
    assert step_buckets(1) == [1]
    assert step_buckets(48) == [1, 2, 4, 8, 16, 24, 32, 48]
    assert step_buckets(100)[-3:] == [64, 96, 100]


def test_windows_and_stop_tokens() -> None:
    with pytest.raises(ConfigError, match="--max-model-tokens 600 is over the model's window of 512"):
        scheduler_config(make_config("cpu", max_model_tokens=600), ModelLimits(100, 512, ()))
    for choices, window in (({"max_model_tokens": 1}, 512), ({}, 1)):  # front ends refuse it too
        with pytest.raises(ConfigError, match="no room for a prompt and an answer"):
            scheduler_config(make_config("cpu", **choices), ModelLimits(100, window, ()))
    with pytest.raises(ConfigError, match="stop tokens"):
        scheduler_config(make_config("cpu"), ModelLimits(100, 512, tuple(range(99))))
    made = scheduler_config(make_config("cpu", kv_tokens=1000, max_model_tokens=500), ModelLimits(100, 512, (7, 9)))
    assert (int(made["blocks"]), int(made["blocks_per_sequence"])) == (63, 32)  # 62 whole ones and the scratch block
    assert made["eos_tokens"][:2].tolist() == [7, 9]


def test_the_cache_takes_the_rest_of_a_device() -> None:
    """0.9 of 150 GB: what weights and work space leave, in whole blocks of 16 tokens of 128 KiB."""
    folder, config = model(), make_config("cuda")
    assert folder.parameters == PARAMETERS_8B == 8_030_261_248
    assert token_bytes(folder.config, "bfloat16") == 2 * 32 * 8 * 128 * 2 == 131072
    left = 135 * 10**9 - 2 * PARAMETERS_8B - BESIDE_8B
    assert left == 114_713_191_936
    fitted = fit_memory(config, folder, WINDOW, 135 * 10**9)
    assert fitted == replace(config, kv_tokens=875_184)
    assert 875_184 % 16 == 0
    assert 875_184 * 131072 <= left < (875_184 + 16) * 131072


def test_the_cache_is_no_larger_than_what_can_run() -> None:
    config = make_config("cuda", max_model_tokens=2048)
    assert fit_memory(config, model(), 2048, 135 * 10**9).kv_tokens == 256 * 2048


def test_float32_takes_twice_the_room() -> None:
    """Weights, activations and cache; logits and tokens do not change."""
    fixed = 4 * PARAMETERS_8B + BESIDE_8B + 2 * 512 * 67584 * 2
    available = fixed + 1000 * 262144 + 5
    assert fit_memory(make_config("cuda", dtype="float32"), model(), WINDOW, available).kv_tokens == 992


def test_a_cache_that_was_asked_for() -> None:
    """It is taken as it is, or refused with what it needs: (20,286,808,064 + 117,964,800,000) bytes."""
    assert fit_memory(make_config("cuda", kv_tokens=5000), model(), WINDOW, 135 * 10**9).kv_tokens == 5000
    with pytest.raises(ExhaustedError) as error:
        fit_memory(make_config("cuda", kv_tokens=900_000), model(), WINDOW, 135 * 10**9)
    said = "needs 128.8 GiB, 109.9 GiB of it KV cache; 125.7 GiB are free; a smaller --kv-tokens helps"
    assert str(error.value) == said


def test_a_device_that_is_too_small() -> None:
    """A block of the cache is the least; without room for it no option helps but another model."""
    fixed = 2 * PARAMETERS_8B + BESIDE_8B
    assert fit_memory(make_config("cuda"), model(), WINDOW, fixed + 16 * 131072).kv_tokens == 16
    with pytest.raises(ExhaustedError) as error:
        fit_memory(make_config("cuda"), model(), WINDOW, fixed + 16 * 131072 - 1)
    assert str(error.value) == "needs 18.9 GiB without a KV cache; 18.9 GiB are free"


def test_the_soft_gpu() -> None:
    """Four bytes a weight, rotary tables beside their angles, 400 MiB, and a cache of its own default size (256 KiB a
    token)."""
    needed = 4 * PARAMETERS_8B + ROTARY_8B * 3 // 2 + 400 * 2**20 + 16384 * 262144
    assert fit_memory(make_config("cpu"), model(), WINDOW, needed).kv_tokens == 16384
    with pytest.raises(ExhaustedError, match=r"4\.0 GiB of it KV cache"):
        fit_memory(make_config("cpu"), model(), WINDOW, needed - 1)
    assert 0 < DeviceUse(make_config("cpu")).available() < 1 << 50


@pytest.fixture
def hundred(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A CUDA device of 100 GB, and how to say how many of them are free; below zero: it does not tell."""
    monkeypatch.setattr(memory, "first_device", lambda: Device("Example 100", 100 * 10**9, (9, 0)))
    free = 100

    def free_bytes() -> int:
        if free < 0:
            raise CudaError("not told")
        return free * 10**9

    def tell(gigabytes: int) -> None:
        nonlocal free
        free = gigabytes

    monkeypatch.setattr(memory, "free_bytes", free_bytes)
    return tell


def test_what_others_have_taken_of_a_device(hundred: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    """90 GB are the share. Others take 30 of 100; a chain takes 60, of which a successor finds all again."""
    use = DeviceUse(make_config("cuda"))
    assert use.available() == 90 * 10**9
    assert not caplog.text
    hundred(70)
    assert use.available() == 70 * 10**9
    assert "65.2 GiB of its memory are free" in caplog.text
    use.before_start()
    hundred(10)
    use.when_ready()
    assert use.available() == 10 * 10**9
    assert use.available(replaced=1) == 70 * 10**9
    hundred(35)  # 25 of the others' are given back
    assert use.available(replaced=1) == 90 * 10**9
    use.before_start()  # the chain has gone
    assert use.available(replaced=1) == 35 * 10**9


def test_a_device_that_does_not_tell_what_is_free(
    hundred: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    hundred(-1)
    use = DeviceUse(make_config("cuda"))
    use.before_start()
    use.when_ready()
    assert use.available(replaced=1) == use.available() == 90 * 10**9
    assert "taking the device as ours alone: not told" in caplog.text


@pytest.mark.skipif(has_device(), reason="a CUDA device is there")
def test_without_a_device_nothing_is_free() -> None:
    with pytest.raises(CudaError, match="CUDA"):
        free_bytes()
    with pytest.raises(BadRequestError, match="CUDA"):
        DeviceUse(make_config("cuda")).available()


def test_head_sizes() -> None:
    """A CUDA device takes multiples of 16; the soft GPU takes multiples of 8."""
    for head_dim in (64, 80, 96, 128, 256):
        assert prepare(make_config("cuda"), model(head_dim=head_dim), "model", 10**12).window == WINDOW
    with pytest.raises(BadRequestError, match="head_dim 72 is not supported on a CUDA device"):
        prepare(make_config("cuda"), model(head_dim=72), "model", 10**12)
    assert prepare(make_config("cpu"), model(head_dim=72), "model", 10**12).longest == 16385


def test_what_is_prepared() -> None:
    """Name, fitted configuration, window and the longest sequence that the cache holds, one token beyond it."""
    made = prepare(make_config("cuda", kv_tokens=10_000, max_model_tokens=9000), model(), "m", 10**12)
    assert (made.name, made.config.kv_tokens, made.window, made.longest) == ("m", 10_000, 9000, 9000)
    assert made.limits == ModelLimits(128256, WINDOW, (2,))
    assert prepare(make_config("cuda", kv_tokens=8001), model(), "m", 10**12).longest == 8001
    with pytest.raises(BadRequestError, match="over the model's window"):
        prepare(make_config("cuda", max_model_tokens=WINDOW + 1), model(), "m", 10**12)


def test_the_device_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too old, and packages that are missing or for something else; the soft GPU does not care."""

    def found(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(device_check, "first_device", lambda: Device("Example 100", 1 << 36, capability))

    monkeypatch.setattr(device_check, "header_folder", lambda: Path())
    monkeypatch.setattr(device_check, "device_runtime_library", lambda: Path())
    monkeypatch.setattr(device_check, "_PACKAGES", {"json": "json"})
    monkeypatch.setattr(device_check.metadata, "version", lambda name: "2.9.1+cu130")  # type: ignore[attr-defined]
    found((8, 6))
    with pytest.raises(ConfigError, match=r"Example 100 has compute capability 8\.6, at least 9\.0 is needed"):
        require_device("cuda")
    for capability in ((9, 0), (10, 0), (12, 1)):
        found(capability)
        require_device("cuda")
    monkeypatch.setattr(device_check, "_PACKAGES", {"json": "json", "absent_a": "absent-a", "absent_b.c": "absent-b"})
    with pytest.raises(ConfigError, match="absent-a, absent-b"):
        require_device("cuda")
    monkeypatch.setattr(device_check, "_PACKAGES", {"json": "json"})
    monkeypatch.setattr(device_check.metadata, "version", lambda name: "2.9.1+cpu")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"torch 2\.9\.1\+cpu was built for the CPU"):
        require_device("cuda")
    require_device("cpu")


def test_the_device_is_asked_about_rdma_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed (extra cuda)")
    asked = []

    def refuse(driver: object, device: object, wish: object) -> None:
        asked.append((device, wish))
        raise RegistrationError("its write ordering is 0")

    for name in ("header_folder", "device_runtime_library"):
        monkeypatch.setattr(device_check, name, lambda: Path())
    monkeypatch.setattr(device_check, "_PACKAGES", {"json": "json"})
    monkeypatch.setattr(device_check.metadata, "version", lambda name: "2.9.1+cu130")  # type: ignore[attr-defined]
    monkeypatch.setattr(device_check, "first_device", lambda: Device("Example 100", 1 << 36, (9, 0)))
    monkeypatch.setattr(device_check, "check_device", refuse)
    monkeypatch.setattr(driver, "cuDeviceGet", lambda number: (0, f"device {number}"))
    require_device("cuda")
    require_device("cpu", rdma=Wish())
    assert asked == []
    with pytest.raises(ConfigError, match="--device cuda with RDMA: its write ordering is 0"):
        require_device("cuda", rdma=make_config("cuda", transports=("doca",), rdma_address="192.0.2.1").rdma_wish)
    assert asked == [("device 0", Wish("auto", doca=True))]


def run_runtime(*arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines of `blink-gpu`."""
    command = [sys.executable, "-m", "gpu_runtime.main", "--listen", "127.0.0.1:0", *arguments]
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "80"}
    )
    assert not ran.stdout
    return ran.returncode, ran.stderr.splitlines()


@pytest.mark.skipif(has_device(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--model", "smollm2-135m-instruct"],
        ["--model", "nowhere"],
        ["--transport", "verbs", "--rdma-address", "192.0.2.1"],
    ],
)
def test_a_machine_without_a_device(more: list[str]) -> None:
    """Said at once, in one line, with or without a model to load."""
    status, lines = run_runtime("--device", "cuda", *more)
    assert (status, len(lines)) == (2, 1), lines
    assert lines[0].startswith("--device cuda")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--dtype", "bfloat16"], "the soft GPU computes in float32"),
    ],
)
def test_refusals_of_the_program(arguments: list[str], words: str) -> None:
    status, lines = run_runtime(*arguments)
    assert (status, len(lines)) == (2, 1), lines
    assert words in lines[0]


def test_a_model_that_is_not_there() -> None:
    """Names in brackets are no markup."""
    status, lines = run_runtime("--model", "[red]nowhere")
    assert (status, len(lines)) == (1, 2), lines
    assert lines[1].startswith("'[red]nowhere' is neither a folder")
