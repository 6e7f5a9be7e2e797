"""One model in place of another, with streams running: `blinkctl load --replace` and what it stands on."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import torch
from tokenizers import Tokenizer

from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from tests.e2e.serving import Serving, serving
from tests.e2e.test_control import code_of, ctl, runtime, wait_serving
from tests.tiny import SIZES, save_tiny, save_tokenizer

STREAMS = 24
TOKENS = 480
"""So long that much is left when the streams all run, and so few that they all run at once in the default cache."""


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family with the same tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("other-model"), "qwen2")


def expected_text(folder: Path, prompt: list[int], tokens: int) -> str:
    """What transformers says, greedily."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    answer: list[int] = ids[0, len(prompt) :].tolist()
    return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(answer, skip_special_tokens=True))


class States:
    """Everything that WatchState says from now on, with the time."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._call = ControlStub(self._channel).WatchState(control_pb2.WatchStateRequest())
        self.seen: list[tuple[float, control_pb2.State]] = []
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            for state in self._call:
                self.seen.append((time.monotonic(), state))
        except grpc.RpcError:
            pass  # the end of the test

    def wait(self, phase: int, epoch: int, seconds: float = 60) -> tuple[float, control_pb2.State]:
        """The first such state and when it came."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for when, state in self.seen:
                if (state.phase, state.epoch) == (phase, epoch):
                    return when, state
            time.sleep(0.01)
        raise TimeoutError(f"no state {phase} of epoch {epoch} in {self.seen}")

    @property
    def phases(self) -> list[tuple[int, int]]:
        """(phase, epoch) in order."""
        return [(state.phase, state.epoch) for _, state in self.seen]


def body(model: str, tokens: int, prompt: str | list[int] = "hello", **more: object) -> dict[str, object]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


async def streams_meanwhile(
    server: Serving, meanwhile: Callable[[], None], count: int = STREAMS
) -> list[tuple[str, float, str]]:
    """Calls `meanwhile` once all streams run; of each stream its text, its end, and the error that it may end with."""

    async def one(client: httpx.AsyncClient, index: int) -> tuple[str, float, str]:
        text, error = "", ""
        request = body("tiny", TOKENS, f"say {index}", stream=True)
        async with client.stream("POST", f"{server.http}/v1/completions", json=request) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    error = event["error"]["message"] if "error" in event else error
                    text += "".join(choice["text"] for choice in event.get("choices", []))
        return text, time.monotonic(), error

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        tasks = [asyncio.create_task(one(client, index)) for index in range(count)]
        deadline = time.monotonic() + 20
        while await asyncio.to_thread(server.metric, "blink_device_sequences_running") < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await asyncio.to_thread(meanwhile)
        return await asyncio.gather(*tasks)


def wait_served(server: Serving, model: str, seconds: float = 60) -> None:
    """Waits until the front end serves a model."""
    deadline = time.monotonic() + seconds
    while True:
        listed = [one["id"] for one in httpx.get(f"{server.http}/v1/models").json().get("data", [])]
        if listed == [model] and httpx.get(f"{server.http}/ready").status_code == 200:
            return
        assert time.monotonic() < deadline, listed
        time.sleep(0.05)


def test_a_model_replaces_another_under_load(tiny_server: Serving, tiny_model: Path, other_model: Path) -> None:
    """Bad ones are refused and nothing happens; for a good one the streams finish, then the front end serves it."""
    alone = [
        httpx.post(f"{tiny_server.http}/v1/completions", json=body("tiny", TOKENS, f"say {index}"), timeout=60)
        for index in range(3)
    ]
    states = States(tiny_server.control)
    stub = ControlStub(grpc.insecure_channel(tiny_server.control))
    asked: list[float] = []

    def replace() -> None:
        for source, code in (("", "INVALID_ARGUMENT"), ("/nowhere", "INVALID_ARGUMENT")):
            request = control_pb2.LoadModelRequest(source=source, name="other", replace=True, grace_seconds=60)
            assert code_of(stub.LoadModel, request).name == code
        without = control_pb2.LoadModelRequest(source=str(other_model), name="other")
        assert code_of(stub.LoadModel, without) == grpc.StatusCode.FAILED_PRECONDITION
        assert states.phases == [(control_pb2.PHASE_SERVING, 1)]
        asked.append(time.monotonic())
        request = control_pb2.LoadModelRequest(source=str(other_model), name="other", replace=True, grace_seconds=60)
        *steps, last = stub.LoadModel(request, timeout=120)
        assert (last.done, last.model.name, last.model.architecture) == (True, "other", "Qwen2ForCausalLM")
        assert "draining tiny" in {step.stage for step in steps}

    ended = asyncio.run(streams_meanwhile(tiny_server, replace))
    assert not {error for _, _, error in ended} - {""}
    assert [text for text, _, _ in ended[:3]] == [answer.json()["choices"][0]["text"] for answer in alone]
    draining, loading = (
        states.wait(phase, epoch)[0]
        for phase, epoch in ((control_pb2.PHASE_DRAINING, 1), (control_pb2.PHASE_LOADING, 2))
    )
    assert asked[0] < draining < min(when for _, when, _ in ended)
    assert max(when for _, when, _ in ended) < states.wait(control_pb2.PHASE_SERVING, 2)[0]
    assert draining < loading
    assert {phase for phase, epoch in states.phases if epoch == 1} >= {
        control_pb2.PHASE_SERVING,
        control_pb2.PHASE_DRAINING,
    }

    wait_served(tiny_server, "other")
    prompt = [5, 80, 33, 121, 7]
    answer = httpx.post(f"{tiny_server.http}/v1/completions", json=body("other", 24, prompt)).json()
    assert answer["choices"][0]["text"] == expected_text(other_model, prompt, 24)
    assert httpx.post(f"{tiny_server.http}/v1/completions", json=body("tiny", 4)).status_code == 404
    assert "loaded tiny" in ctl(tiny_server.control, "load", str(tiny_model), "--name", "tiny", "--replace").stdout
    wait_served(tiny_server, "tiny")
    answer = httpx.post(f"{tiny_server.http}/v1/completions", json=body("tiny", TOKENS, "say 0"), timeout=60)
    assert answer.json()["choices"] == alone[0].json()["choices"]


def test_the_grace_time_ends(tiny_server: Serving, other_model: Path) -> None:
    """Streams that are not finished by then end with an error, and the new model comes."""

    stub = ControlStub(grpc.insecure_channel(tiny_server.control))

    def replace() -> None:
        request = control_pb2.LoadModelRequest(source=str(other_model), name="other", replace=True, grace_seconds=0)
        assert list(stub.LoadModel(request, timeout=60))[-1].done

    ended = asyncio.run(streams_meanwhile(tiny_server, replace))
    assert {bool(error) for _, _, error in ended} >= {True}
    wait_served(tiny_server, "other")
    assert httpx.post(f"{tiny_server.http}/v1/completions", json=body("other", 4)).status_code == 200


def test_models_that_do_not_fit_leave_the_old_one(tiny_model: Path, other_model: Path, tmp_path: Path) -> None:
    """Each is refused for its own reason, in the state and epoch that were before."""
    names = ("broken", "wide", "short", "mute", "unset", "untold", "wordy")
    broken, wide, short, mute, unset, untold, wordy = (tmp_path / name for name in names)
    for folder in (broken, short, mute, unset, untold, wordy):
        save_tiny(folder, "llama")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-100])
    (mute / "tokenizer.json").write_text("{}")
    (unset / "tokenizer_config.json").write_text("{not json")
    (untold / "chat_template.jinja").write_text("{% if %}")
    save_tokenizer(wordy / "tokenizer.json", SIZES["vocab_size"] + 1)
    shrink(short, max_position_embeddings=256)
    save_wide(wide)
    sizes = ("--max-model-tokens", "512", "--kv-tokens", "2000000")
    with runtime("--model", str(tiny_model), "--name", "tiny", *sizes) as (address, process):
        stub = ControlStub(grpc.insecure_channel(address))
        wait_serving(stub)
        (chain,) = psutil.Process(process.pid).children()
        status = grpc.StatusCode
        for source, code in (
            (broken, status.INVALID_ARGUMENT),
            (mute, status.INVALID_ARGUMENT),
            (unset, status.INVALID_ARGUMENT),
            (untold, status.INVALID_ARGUMENT),
            (wordy, status.INVALID_ARGUMENT),
            (short, status.INVALID_ARGUMENT),
            (wide, status.RESOURCE_EXHAUSTED),
        ):
            request = control_pb2.LoadModelRequest(source=str(source), name="new", replace=True, grace_seconds=5)
            assert code_of(stub.LoadModel, request) == code, source.name
        state = stub.GetServerInfo(control_pb2.GetServerInfoRequest()).state
        assert (state.phase, state.epoch, state.model) == (control_pb2.PHASE_SERVING, 1, "tiny")
        assert psutil.Process(process.pid).children() == [chain]
        same = control_pb2.LoadModelRequest(source=str(tiny_model), name="tiny", replace=True)
        assert list(stub.LoadModel(same, timeout=20))[-1].done
        assert psutil.Process(process.pid).children() == [chain]
        assert "loaded new" in ctl(address, "load", str(other_model), "--name", "new", "--replace").stdout
        assert not chain.is_running()
        state = stub.GetServerInfo(control_pb2.GetServerInfoRequest()).state
        assert (state.phase, state.epoch, state.model) == (control_pb2.PHASE_SERVING, 2, "new")


def shrink(folder: Path, **changes: int) -> None:
    """Changes a model's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_wide(folder: Path) -> None:
    """A small model whose cache takes 128 KiB a token."""
    import transformers

    sizes = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256}
    config = transformers.LlamaConfig(**SIZES | sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json", SIZES["vocab_size"])


def test_a_new_chain_that_does_not_start(tiny_model: Path, other_model: Path) -> None:
    """Then nothing is loaded and the state says why; a load thereafter works."""
    with runtime("--model", str(tiny_model), "--name", "tiny") as (address, process):
        stub = ControlStub(grpc.insecure_channel(address))
        wait_serving(stub)
        (old,) = psutil.Process(process.pid).children()
        request = control_pb2.LoadModelRequest(source=str(other_model), name="other", replace=True, grace_seconds=5)
        steps = stub.LoadModel(request, timeout=60)
        while not [child for child in psutil.Process(process.pid).children() if child != old]:
            time.sleep(0.005)
        (new,) = [child for child in psutil.Process(process.pid).children() if child != old]
        assert not old.is_running()
        new.kill()
        with pytest.raises(grpc.RpcError) as refused:
            list(steps)
        assert refused.value.code() == grpc.StatusCode.ABORTED
        state = stub.GetServerInfo(control_pb2.GetServerInfoRequest()).state
        assert (state.phase, state.epoch, state.model) == (control_pb2.PHASE_IDLE, 2, "")
        assert "other" in state.detail
        assert "status -9" in state.detail
        assert json.loads(ctl(address, "--output", "json", "list").stdout) == []
        ctl(address, "load", str(tiny_model), "--name", "tiny")
        assert stub.GetServerInfo(control_pb2.GetServerInfoRequest()).state.epoch == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_sigterm_while_the_old_model_drains(tiny_model: Path, other_model: Path, tmp_path: Path) -> None:
    """The runtime's own grace time counts then, the new model does not start, and nothing stays in /dev/shm."""
    before = {path.name for path in Path("/dev/shm").glob("blink-arena-*")}
    with serving(tmp_path, str(tiny_model), "tiny", ("--grace", "1")) as server:
        runtime_process = server.child("gpu_runtime.main")
        states = States(server.control)

        def replace_and_end() -> None:
            stub = ControlStub(grpc.insecure_channel(server.control))
            request = control_pb2.LoadModelRequest(
                source=str(other_model), name="other", replace=True, grace_seconds=3000
            )
            steps = stub.LoadModel(request, timeout=60)
            states.wait(control_pb2.PHASE_DRAINING, 1)
            until = time.monotonic() + 5
            while httpx.get(f"{server.http}/ready").status_code == 200:  # the front end looks every half second
                assert time.monotonic() < until
                time.sleep(0.02)
            refused = httpx.post(f"{server.http}/v1/completions", json=body("tiny", 4))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            runtime_process.terminate()
            with pytest.raises(grpc.RpcError):
                list(steps)

        asyncio.run(streams_meanwhile(server, replace_and_end))
        runtime_process.wait(20)
        assert control_pb2.PHASE_LOADING not in [phase for phase, epoch in states.phases if epoch == 2]
        server.process.wait(40)
    assert {path.name for path in Path("/dev/shm").glob("blink-arena-*")} <= before
