"""Real answers, held against the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from blink_proto.arena import DeviceState, ErrorCode, Finish
from tests import tiny_text
from tests.front_end import MODEL, FrontEnd, eventually, front_end
from tests.openapi import DOCUMENT, check_answer
from tests.replay import Script

TEXT = [*tiny_text.byte_ids("a😀b".encode()), tiny_text.special(tiny_text.END)]
ROUTES = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end("--workers", "1", "--no-access-log", "--max-body-bytes", "100000") as running:
        running.device.script = lambda submission: Script(TEXT)
        yield running


def ask(front: FrontEnd, path: str, **fields: Any) -> httpx.Response:
    subject = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(front.http + path, json={"model": MODEL, **subject, **fields}, timeout=20)
    check_answer(path, answer)
    return answer


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [False, True])
def test_answers(front: FrontEnd, path: str, stream: bool, n: int, logprobs: bool) -> None:
    fields: dict[str, Any] = {"n": n, "stream": stream, "max_tokens": 50}
    if logprobs:
        fields |= {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
    for usage in (False, True) if stream else (False,):
        more = {"stream_options": {"include_usage": usage}} if stream else {}
        assert ask(front, path, **fields, **more).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"logprobs": 1, "return_tokens_as_token_ids": True},
        {"prompt": ["hi", "ho"], "echo": True, "logprobs": 1, "n": 2},
    ],
)
def test_what_completions_say_of_prompts(front: FrontEnd, fields: dict[str, Any], stream: bool) -> None:
    assert ask(front, "/v1/completions", stream=stream, **fields).status_code == 200


def test_the_best_of_several(front: FrontEnd) -> None:
    assert ask(front, "/v1/completions", best_of=3, logprobs=1).status_code == 200


@pytest.mark.parametrize(("stream", "status"), [(False, 200), (True, 400)])
def test_scores_of_a_prompt_in_a_field_of_their_own(front: FrontEnd, stream: bool, status: int) -> None:
    assert ask(front, "/v1/completions", prompt="hi there", prompt_logprobs=1, stream=stream).status_code == status


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, 200),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}, 200),
        ("/tokenize", {}, 400),
        ("/detokenize", {"tokens": [5, 6]}, 200),
        ("/detokenize", {"tokens": [10**6]}, 400),
    ],
)
def test_tokens(front: FrontEnd, path: str, fields: dict[str, Any], status: int) -> None:
    answer = httpx.post(front.http + path, json={"model": MODEL, **fields})
    assert answer.status_code == status
    check_answer(path, answer)


@pytest.mark.parametrize("path", ROUTES)
def test_errors(front: FrontEnd, path: str) -> None:
    assert ask(front, path, n=0).status_code == 400
    assert ask(front, path, model="no-such").status_code == 404
    assert ask(front, path, user="x" * 100_001).status_code == 413
    assert ask(front, path, n=16, prompt=["x"] * 1000).status_code == (400 if path == "/v1/completions" else 200)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_device(front: FrontEnd, path: str, stream: bool) -> None:
    said = front.device.script
    front.device.script = lambda submission: Script(
        TEXT[:2], Finish.ERROR, end_apart=True, error=ErrorCode.BAD_MAX_TOKENS, every=0.02
    )
    try:
        answer = ask(front, path, stream=stream)
    finally:
        front.device.script = said
    assert (answer.status_code == 200) == stream
    assert json.loads(answer.text.split("data: ")[-2] if stream else answer.text)["error"]["code"] == "device_error"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics", "/version"])
def test_what_is_only_read(front: FrontEnd, path: str) -> None:
    answer = httpx.get(front.http + path.replace("{model}", MODEL))
    assert answer.status_code == 200
    check_answer(path, answer)


def test_a_missing_model(front: FrontEnd) -> None:
    check_answer("/v1/models/{model}", httpx.get(front.http + "/v1/models/none"))


def test_the_document_is_served(front: FrontEnd) -> None:
    answer = httpx.get(front.http + "/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == DOCUMENT


def test_no_device_no_readiness(front: FrontEnd) -> None:
    front.device.state = DeviceState.DRAINING
    try:
        eventually(lambda: httpx.get(front.http + "/ready").status_code == 503)
        check_answer("/ready", httpx.get(front.http + "/ready"))
        for path in ROUTES:
            assert ask(front, path).status_code == 503
    finally:
        front.device.state = DeviceState.RUNNING
    eventually(lambda: httpx.get(front.http + "/ready").status_code == 200)
