"""`blink up --gpus 2`: one front end before two runtimes, over HTTPS."""

from __future__ import annotations

import json
import os
import re
import ssl
from pathlib import Path

import httpx
import psutil
import pytest
import typer

from blink_deploy.devices import device_of, share_of_cores
from tests.e2e.serving import Serving, serving
from tests.front_end import eventually

PROMPTS = [f"{word} and more of it" for word in ("hello", "water", "seven", "green", "north", "glass")]


def ask(client: httpx.Client, prompt: str, **more) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    return client.post("/v1/completions", json=body)


def requests_of(client: httpx.Client) -> dict[str, float]:
    """Requests that each runtime got, by its number."""
    found: dict[str, float] = {}
    sample = re.compile(r'blink_runtime_requests_total\{chosen="\w+",runtime="(\d+)"\} (.+)')
    for number, count in sample.findall(client.get("/metrics").text):
        found[number] = found.get(number, 0) + float(count)
    return found


def test_two_serve_as_one_and_one_serves_on(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--gpus", "2", "--workers", "1", "--dpu-args", f"--device-timeout 3 --data-dir {tmp_path}")
    with serving(tmp_path, str(tiny_model), "tiny", arguments) as server:
        context = ssl.create_default_context(cafile=str(tmp_path / "tls-cert.pem"))
        with httpx.Client(base_url=server.https, verify=context, timeout=60) as client:
            eventually(lambda: client.get("/ready").json() == {"status": "ready"})
            texts = {prompt: {ask(client, prompt).json()["choices"][0]["text"] for _ in range(4)} for prompt in PROMPTS}
            assert all(len(found) == 1 for found in texts.values())
            assert min(requests_of(client).values()) >= 8, "both had their part"
            alone_after_one_is_killed(server, client, texts)


def alone_after_one_is_killed(server: Serving, client: httpx.Client, texts: dict[str, set[str]]) -> None:
    before = requests_of(client)
    with client.stream("POST", "/v1/completions", json=long_stream()) as one:
        lines = one.iter_lines()
        next(lines)
        now = requests_of(client)
        (number,) = [key for key in now if now[key] > before[key]]
        runtimes = [
            child for child in psutil.Process(server.process.pid).children() if "gpu_runtime.main" in child.cmdline()
        ]
        runtimes[int(number)].kill()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "device_unavailable"
    assert list(client.get("/ready").json()["unready"]) == [number]
    for prompt, found in texts.items():
        assert {ask(client, prompt).json()["choices"][0]["text"] for _ in range(2)} == found
    left = str(1 - int(number))
    assert requests_of(client)[left] - now[left] == 2 * len(texts)
    eventually(lambda: f"blink-gpu {number} ended with status -9; the others serve on" in server.log.read_text())
    assert server.process.poll() is None


def long_stream() -> dict:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}


def test_soft_gpus_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert share_of_cores("cpu", 4) == ["--threads", "3"]
    assert share_of_cores("cpu", 64) == ["--threads", "1"]
    assert share_of_cores("cpu", 1) == share_of_cores("cuda", 4) == []


def test_each_runtime_sees_its_own_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [device_of("cuda", k, 3) for k in range(3)] == [{"CUDA_VISIBLE_DEVICES": str(k)} for k in range(3)]
    assert device_of("cuda", 0, 1) == device_of("cpu", 1, 2) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert [device_of("cuda", k, 2)["CUDA_VISIBLE_DEVICES"] for k in range(2)] == ["5", "GPU-abc"]
    with pytest.raises(typer.BadParameter, match="more devices"):
        device_of("cuda", 2, 3)
