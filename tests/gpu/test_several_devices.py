"""One front end before two CUDA devices: one text from both, both at work, and one serves on when the other ends."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.test_served_device import MODEL, PROMPTS, body

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
COUNT = 32


@pytest.fixture(scope="module")
def server(serving_device: str, real_model: Path) -> Iterator[object]:
    """SmolLM2-135M-Instruct in float32, twice."""
    import torch

    from tests.bench.gpu.served import serve

    if serving_device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are fewer than two CUDA devices")
    arguments = ["--device", serving_device, "--dtype", "float32", "--model", str(real_model), "--name", MODEL]
    arguments += ["--gpus", "2", "--workers", "2", "--dpu-args", "--device-timeout 3"]
    with serve(arguments) as started:
        wait_unready(started.url, set())
        yield started


def test_both_say_what_one_says_and_one_serves_on(server) -> None:
    texts = asyncio.run(ask_all(server.url, PROMPTS * 8))
    first = texts[: len(PROMPTS)]
    assert texts == first * 8
    requests = requests_of(server.url)
    assert sorted(requests) == ["0", "1"]
    assert min(requests.values()) >= 16, requests
    if os.environ.get("BLINK_TEST_DEVICE", "cuda") == "cuda":
        assert devices_in_use() >= 2
    kill_first(server)
    wait_unready(server.url, {"0"})
    assert asyncio.run(ask_all(server.url, PROMPTS)) == first
    after = requests_of(server.url)
    assert after["1"] - requests["1"] >= len(PROMPTS)


def kill_first(server) -> None:
    """The runtime whose control plane is the first one."""
    import psutil

    processes = [psutil.Process(pid) for pid in server.children("gpu_runtime")]
    (first,) = [one for one in processes if {"gpu_runtime.main", server.control} <= set(one.cmdline())]
    first.kill()


async def ask_all(url: str, prompts: list[str]) -> list[str]:
    """All at once."""
    import httpx

    async with httpx.AsyncClient(verify=False, timeout=60) as client:
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json=body(prompt, COUNT)) for prompt in prompts)
        )
    return [answer.json()["choices"][0]["text"] for answer in answers]


def requests_of(url: str) -> dict[str, float]:
    """Requests that each runtime got."""
    import httpx

    found: dict[str, float] = {}
    sample = re.compile(r'blink_runtime_requests_total\{chosen="\w+",runtime="(\d+)"\} (.+)')
    for number, count in sample.findall(httpx.get(f"{url}/metrics", verify=False).text):
        found[number] = found.get(number, 0) + float(count)
    return found


def devices_in_use() -> int:
    """CUDA devices with memory in use, as the driver lists them."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return sum(int(one) > 2000 for one in used)


def wait_unready(url: str, runtimes: set[str]) -> None:
    """Until exactly these are said not to be ready."""
    import httpx

    deadline = time.monotonic() + 60
    while True:
        answer = httpx.get(f"{url}/ready", verify=False)
        if answer.status_code == 200 and set(answer.json().get("unready", {})) == runtimes:
            return
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)
