"""Both programs end to end, through HTTPS: right text, and models that come and go while requests run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
MODEL = "smol"
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "My favourite season is autumn because",
    "1, 2, 3, 4,",
    "In 1969",
]


@pytest.fixture(scope="module")
def server(serving_device: str, real_model: Path) -> Iterator[object]:
    """SmolLM2-135M-Instruct in float32."""
    from tests.bench.gpu.served import serve

    arguments = ["--device", serving_device, "--dtype", "float32", "--model", str(real_model), "--name", MODEL]
    with serve([*arguments, "--workers", "2"]) as started:
        yield started


def body(prompt: str, count: int, **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}


def test_greedy_text_is_that_of_transformers(server, real_model: Path) -> None:
    """Eight requests at once over HTTPS; the reference generates one by one on the CPU."""
    import httpx
    from tokenizers import Tokenizer

    async def run() -> list[str]:
        async with httpx.AsyncClient(verify=False, timeout=60) as client:
            url = f"{server.url}/v1/completions"
            answers = await asyncio.gather(*(client.post(url, json=body(prompt, 24)) for prompt in PROMPTS))
            return [answer.json()["choices"][0]["text"] for answer in answers]

    texts = asyncio.run(run())
    tokenizer, model = Tokenizer.from_file(str(real_model / "tokenizer.json")), reference.load(real_model)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        whole = tokenizer.decode(ids + reference.greedy(model, ids, 24), skip_special_tokens=True)
        assert text == whole.removeprefix(tokenizer.decode(ids, skip_special_tokens=True))


def test_a_client_that_goes_away(server) -> None:
    """Its sequence is cancelled within a second, and its blocks are free."""
    import httpx

    with (
        httpx.Client(verify=False, timeout=30) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body("Hello", 8000, stream=True)) as answer,
    ):
        lines = answer.iter_lines()  # without a name it would end, and the connection with it
        next(lines)
        assert metric(server.url, "blink_device_sequences_running") == 1
    deadline = time.monotonic() + 10
    while metric(server.url, "blink_device_kv_blocks_used") > 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_unload_and_load_while_requests_run(server, serving_device: str, real_model: Path) -> None:
    """Unloading lets what runs finish; afterwards nothing is served; loaded again, the same text comes."""
    import httpx

    from blink_deploy.client import ControlClient
    from blink_proto.dial import Dial

    texts: list[str] = []
    count = 1500 if serving_device == "cuda" else 200
    with httpx.Client(verify=False, timeout=60) as client, ControlClient(Dial(server.control)) as control:
        url = f"{server.url}/v1/completions"
        first = client.post(url, json=body(PROMPTS[0], 24)).json()["choices"][0]["text"]
        with client.stream("POST", url, json=body(PROMPTS[0], count, stream=True)) as answer:
            lines = answer.iter_lines()
            texts.append(text_of(next(lines)))
            control.unload(MODEL, 60)
            texts += [text_of(line) for line in lines]
        assert len("".join(texts)) > count
        assert "".join(texts).startswith(first)
        assert client.post(url, json=body(PROMPTS[0], 4)).status_code in (404, 503)
        assert client.get(f"{server.url}/ready").status_code == 503
        *_, last = control.load(str(real_model), MODEL, 120)
        assert last.done
        wait_ready(server.url)
        assert client.post(url, json=body(PROMPTS[0], 24)).json()["choices"][0]["text"] == first


def text_of(line: str) -> str:
    """The text of one server-sent event; empty for lines without any."""
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event, event
    choices = event.get("choices") or [{}]
    return str(choices[0].get("text", ""))


def wait_ready(url: str) -> None:
    """Waits until requests are taken again."""
    from tests.bench.gpu.served import is_ready

    deadline = time.monotonic() + 60
    while not is_ready(url):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def metric(url: str, name: str) -> float:
    """The value of a series without labels."""
    import httpx

    for line in httpx.get(f"{url}/metrics", verify=False).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise LookupError(name)
