"""The whole with a real model: real processes, real sockets, the openai package."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time

import grpc
import httpx
import openai
import psutil
import pytest

from blink_proto import control_pb2
from blink_proto.control_pb2_grpc import ControlStub
from tests.e2e.serving import Serving

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "1 2 3 4 5 6 7",
    "Water boils at",
    "A list of fruits:\n- apple\n- ",
    "In the beginning " * 20,
]


def parameters(index: int) -> dict:
    """32 different greedy requests of different lengths."""
    return {
        "prompt": f"{PROMPTS[index % 8]} {index}",
        "max_tokens": 4 + 2 * (index % 11),
        "temperature": 0,
    }


async def stream(client: openai.AsyncOpenAI, model: str, index: int) -> tuple[str, str]:
    """Text and finish reason of one streamed completion."""
    text, reason = "", ""
    async for chunk in await client.completions.create(model=model, stream=True, **parameters(index)):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def test_32_streams_equal_the_same_requests_alone(default_server: Serving) -> None:
    async def run() -> None:
        client, model = default_server.async_client(), default_server.model
        alone = [await stream(client, model, index) for index in range(32)]
        together = await asyncio.gather(*(stream(client, model, index) for index in range(32)))
        assert together == alone
        assert all(reason in {"stop", "length"} for _, reason in alone)
        assert len({text for text, _ in alone}) > 20

    asyncio.run(run())


def test_chat_over_https(default_server: Serving) -> None:
    client = openai.OpenAI(
        base_url=f"{default_server.https}/v1", api_key="unused", http_client=httpx.Client(verify=False)
    )
    answer = client.chat.completions.create(
        model=default_server.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
    )
    assert answer.choices[0].message.content.startswith("The capital of France is Paris.")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 8  # "The capital of France is Paris." and the end of the turn


def test_seeded_sampling_repeats_under_load(default_server: Serving) -> None:
    async def run() -> None:
        client, model = default_server.async_client(), default_server.model

        async def sampled(seed: int) -> str:
            answer = await client.completions.create(
                model=model,
                prompt="My favourite",
                max_tokens=12,
                temperature=1.2,
                top_p=0.9,
                seed=seed,
                extra_body={"top_k": 50},
            )
            return answer.choices[0].text

        alone = await sampled(1)
        crowd = await asyncio.gather(*(sampled(seed) for seed in (1, 1, 2, 3, 4, 5, 1)))
        assert [text for text, seed in zip(crowd, (1, 1, 2, 3, 4, 5, 1), strict=True) if seed == 1] == [alone] * 3
        assert len(set(crowd)) > 3

    asyncio.run(run())


def test_what_a_request_changes_about_the_logits(default_server: Serving) -> None:
    """Only listed tokens come, wanted ones do, forbidden ones do not; repetition can be had; an answer goes on."""
    client, model = default_server.client(), default_server.model

    def greedy(tokens: int, **fields: object) -> str:
        answer = client.completions.create(
            model=model, prompt="The capital of France is", max_tokens=tokens, temperature=0, extra_body=fields
        )
        return answer.choices[0].text

    ours, other = (greedy(1, allowed_token_ids=[token]) for token in (500, 501))
    assert ours != other
    assert greedy(3, allowed_token_ids=[500]) == greedy(3, logit_bias={"500": 100}) == ours * 3
    assert greedy(3, allowed_token_ids=[500, 501], logit_bias={"500": -100}) == other * 3
    assert set(greedy(6, repetition_penalty=0.01).split()) <= {"The", "capital", "of", "France", "is"}
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=30,
        extra_body={"min_tokens": 20},
    )
    assert answer.usage.completion_tokens >= 20


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def raw_post(path: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_disconnects_frees_its_sequence(default_server: Serving, streamed: bool) -> None:
    body = {"model": default_server.model, "prompt": "Count:", "max_tokens": 4000, "stream": streamed}
    body["ignore_eos"] = True
    with socket.create_connection(address_of(default_server.http)) as connection:
        connection.sendall(raw_post("/v1/completions", body))
        default_server.wait_metric("blink_device_sequences_running", 1)
    default_server.wait_metric("blink_device_sequences_running", 0)
    default_server.wait_metric("blink_device_kv_blocks_used", 0)


def test_a_stopped_host_process_changes_nothing(default_server: Serving) -> None:
    """The control process is stopped before the requests start and while they run; they all complete."""
    control = default_server.child("gpu_runtime.main")

    async def run() -> list[tuple[str, str]]:
        client = default_server.async_client()
        return await asyncio.gather(*(stream(client, default_server.model, index) for index in range(8)))

    expected = asyncio.run(run())
    control.suspend()
    try:
        while control.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert asyncio.run(run()) == expected
        assert httpx.get(f"{default_server.http}/ready").status_code == 200
    finally:
        control.resume()
    with grpc.insecure_channel(default_server.control) as channel:
        answer = ControlStub(channel).ListModels(control_pb2.ListModelsRequest(), timeout=10)
    assert [model.name for model in answer.models] == [default_server.model]


def test_bad_requests_leave_the_others_alone(default_server: Serving) -> None:
    url = f"{default_server.http}/v1/completions"
    good = {"model": default_server.model, "prompt": "Hello", "max_tokens": 30, "temperature": 0}
    bad = [
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "smollm2-135m-instruct", "prompt": "a", "temperature": NaN}', 400),
        (b'{"model": "smollm2-135m-instruct", "prompt": "a", "max_tokens": "many"}', 400),
        (b'{"model": "smollm2-135m-instruct", "prompt": [49152]}', 400),
        (b'{"model": "smollm2-135m-instruct", "prompt": [-1]}', 400),
        (b'{"model": "other", "prompt": "a"}', 404),
        (b'{"model": "smollm2-135m-instruct", "prompt": "' + b"word " * 9000 + b'"}', 400),
    ]

    async def run() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            running = asyncio.create_task(client.post(url, json=good))
            for body, status in bad:
                begin = time.monotonic()
                answer = await client.post(url, content=body, headers={"content-type": "application/json"})
                assert answer.status_code == status, body[:80]
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert time.monotonic() - begin < 5
            assert (await running).json()["usage"]["completion_tokens"] == 30

    asyncio.run(run())


def test_memory_of_all_processes(default_server: Serving) -> None:
    """Under 2.5 GiB together, after the work of the tests above (shared pages counted once)."""
    tree = [psutil.Process(default_server.process.pid)]
    tree += tree[0].children(recursive=True)
    assert sum(process.memory_full_info().pss for process in tree) < 2.5 * 2**30


def test_second_start_is_quick(tmp_path) -> None:
    """Ready within 15 s once the model has been converted."""
    from tests.e2e.serving import serving

    begin = time.monotonic()
    with serving(tmp_path, "smollm2-135m-instruct") as started:
        assert time.monotonic() - begin < 15
        assert started.stop(signal.SIGINT) == 0
