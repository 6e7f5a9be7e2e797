"""Requests that are refused: at once, in OpenAI's shape, and without the device hearing of them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests import tiny_text
from tests.front_end import MODEL, FrontEnd, eventually, front_end
from tests.replay import Script

V = tiny_text.vocab_size()
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    flags = ("--workers", "1", "--no-access-log", "--queue-depth", "40", "--max-body-bytes", str(4 << 20))
    with front_end(*flags, "--body-timeout", "1", "--header-timeout", "1", "--keep-alive", "1.5") as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> FrontEnd:
    shared.device.submissions.clear()
    return shared


def refused(front: FrontEnd, answer: httpx.Response, status: int, param: str | None, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = json.loads(answer.text, parse_constant=pytest.fail)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"]
    assert not front.device.submissions
    return error


def post(front: FrontEnd, path: str, content: bytes) -> httpx.Response:
    return httpx.post(front.http + path, content=content, timeout=20)


def completion(front: FrontEnd, **fields: Any) -> httpx.Response:
    return post(front, "/v1/completions", json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode())


def chat(front: FrontEnd, **fields: Any) -> httpx.Response:
    return post(front, "/v1/chat/completions", json.dumps({"model": MODEL, "messages": HI, **fields}).encode())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"tiny","prompt":"x","messages":[]} x',
        b"\xff",
        b'{"model":"\\ud800"}',
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_bodies_that_are_no_json(front: FrontEnd, path: str, body: bytes) -> None:
    refused(front, post(front, path, body), 400, None, "invalid_json")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"1e999", b"7"])
def test_bodies_that_are_no_object(front: FrontEnd, path: str, body: bytes) -> None:
    refused(front, post(front, path, body), 400, None, "invalid_type")


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens", "n"],
)
def test_numbers_that_are_none(front: FrontEnd, field: str, raw: str) -> None:
    body = f'{{"model":"{MODEL}","prompt":"hi","{field}":{raw}}}'.encode()
    answer = post(front, "/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_json", "invalid_type")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", True),
        ("echo", "yes"),
        ("best_of", 1.5),
        ("bad_words", "the"),
        ("truncate_prompt_tokens", "5"),
        ("include_stop_str_in_output", 1),
        ("max_tokens", "5"),
        ("max_tokens", 1e18),
        ("max_tokens", 1.5),
        ("n", []),
        ("stream", "yes"),
        ("stop", 5),
        ("stop_token_ids", "5"),
        ("model", 5),
    ],
)
def test_wrong_types(front: FrontEnd, field: str, value: Any) -> None:
    refused(front, completion(front, **{field: value}), 400, field, "invalid_type")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("seed", 2**63),
        ("seed", 2**70),
        ("seed", -(2**63) - 1),
        ("n", 0),
        ("n", 41),
        ("n", 129),
        ("n", 1_000_000),
        ("best_of", 0),
        ("best_of", 41),
        ("best_of", 1_000_000),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("presence_penalty", -10),
        ("max_tokens", 0),
        ("max_tokens", -186),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", "x" * 5000),
        ("stop_token_ids", [V]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(9))),
        ("stream_options", {"include_usage": True}),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -10),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logit_bias", {str(V): 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", {"1" * 30: 1}),
        ("logit_bias", {"1": 100.5}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [V]),
        ("allowed_token_ids", [-1]),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [[], [1]]),
        ("prompt", [-1]),
        ("prompt", [V]),
        ("prompt", [2**40]),
        ("prompt", [10**30]),
        ("prompt", [1.0]),
        ("prompt", [True]),
        ("prompt", ["a", 1]),
        ("prompt", [[1], "a"]),
        ("prompt", ["a"] * 41),
    ],
)
def test_values_out_of_range(front: FrontEnd, field: str, value: Any) -> None:
    refused(front, completion(front, **{field: value}), 400, field, "invalid_value")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("prompt_embeds", "AAAA"),
        ("logits_processors", ["x"]),
        ("return_token_ids", True),
        ("use_beam_search", True),
        ("response_format", {"type": "json_object"}),
        ("guided_regex", "a+"),
    ],
)
def test_what_is_not_built_is_refused_by_name(front: FrontEnd, field: str, value: Any) -> None:
    refused(front, completion(front, **{field: value}), 400, field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("echo", True),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
        ("chat_template", "{{ 1 }}"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("documents", [{"text": "x"}]),
    ],
)
def test_what_chat_does_not_have_is_refused_by_name(front: FrontEnd, field: str, value: Any) -> None:
    refused(front, chat(front, **{field: value}), 400, field, "unsupported_parameter")


def test_defaults_and_unknown_fields_are_no_reason_to_refuse(front: FrontEnd) -> None:
    harmless = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": None, "n": 1}
    harmless |= {"best_of": 1, "echo": False, "suffix": None, "user": "me", "stop": None, "unknown": {"a": [1]}}
    assert completion(front, **harmless).status_code == 200
    front.device.submissions.clear()
    text = {"type": "text"}
    fields = {"tools": [], "tool_choice": "auto", "response_format": text, "logprobs": False, "store": False}
    assert chat(front, **fields, metadata={}).status_code == 200
    front.device.submissions.clear()


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", "invalid_value"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role", "invalid_value"),
        ([*HI, {"role": "function", "content": "x"}], "messages[1].role", "unsupported_parameter"),
        ([{"role": "tool", "content": None}], "messages[0].content", "invalid_value"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call", "unsupported_parameter"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "invalid_value"),
        ([{"role": "user", "content": 5}], "messages[0].content", "invalid_type"),
        ([{"content": "x"}], "messages[0].role", "missing_required_parameter"),
        ("hi", "messages", "invalid_type"),
    ],
)
def test_messages(front: FrontEnd, messages: Any, param: str, code: str) -> None:
    refused(front, chat(front, messages=messages), 400, param, code)


def test_messages_that_are_served(front: FrontEnd) -> None:
    ids = []
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        assert (
            chat(front, messages=[{"role": "system", "content": ""}, {"role": "user", "content": content}]).status_code
            == 200
        )
        ids.append(front.device.submissions.pop().prompt)
    assert ids[0] == ids[1]
    assert ids[0].count(tiny_text.special(tiny_text.BOS)) == 1
    assert chat(front, messages=[{"role": "user", "content": "A<|im_end|>B"}]).status_code == 200
    assert front.device.submissions.pop().prompt.count(tiny_text.special(tiny_text.END)) == 1


def test_missing_fields(front: FrontEnd) -> None:
    refused(front, post(front, "/v1/completions", b'{"prompt":"x"}'), 400, "model", "missing_required_parameter")
    body = json.dumps({"model": MODEL}).encode()
    refused(front, post(front, "/v1/chat/completions", body), 400, "messages", "missing_required_parameter")


def test_unknown_models_and_paths(front: FrontEnd) -> None:
    refused(front, completion(front, model="no-such"), 404, "model", "model_not_found")
    refused(front, httpx.get(front.http + "/v1/models/no-such"), 404, "model", "model_not_found")
    refused(front, httpx.get(front.http + "/v2/models"), 404, None, "unknown_url")
    refused(front, httpx.get(front.http + "/v1/completions"), 405, None, "method_not_allowed")
    refused(front, httpx.post(front.http + "/health"), 405, None, "method_not_allowed")


@pytest.mark.parametrize("wanted", [249, 32000, 2**31 - 1, 2**62])
def test_prompt_and_answer_over_the_window(front: FrontEnd, wanted: int) -> None:
    answer = completion(front, prompt=[1] * 8, max_tokens=wanted)
    message = refused(front, answer, 400, "max_tokens", "context_length_exceeded")["message"]
    assert all(number in message.split() for number in ("8", str(wanted), "256"))
    field = {"max_completion_tokens": wanted}
    error = refused(front, chat(front, **field), 400, "max_completion_tokens", "context_length_exceeded")
    assert "256" in error["message"]


def test_the_window_may_be_filled_to_the_last_token(front: FrontEnd) -> None:
    assert completion(front, prompt=[1] * 8, max_tokens=248).status_code == 200
    assert completion(front, prompt=[1] * 255).status_code == 200
    assert front.device.submissions.pop().max_tokens == 1
    front.device.submissions.clear()


def test_prompts_over_the_window(front: FrontEnd) -> None:
    message = refused(front, completion(front, prompt=[1] * 256), 400, "prompt", "context_length_exceeded")["message"]
    assert message.split().count("256") == 2
    refused(front, completion(front, prompt="a b " * 300), 400, "prompt", "context_length_exceeded")
    long = [{"role": "user", "content": "a b " * 300}]
    refused(front, chat(front, messages=long), 400, "messages", "context_length_exceeded")


def test_valid_edges(front: FrontEnd) -> None:
    for fields in (
        {"prompt": [V - 1]},
        {"seed": 0},
        {"seed": -1},
        {"seed": 2**63 - 1},
        {"temperature": 2},
        {"top_p": 1},
    ):
        assert completion(front, **fields).status_code == 200
    assert completion(front, prompt=["hi", "ho"], n=2, stop=["a"] * 16).status_code == 200
    assert completion(front, prompt="").status_code == 200, "the tokenizer's BOS is a prompt"
    front.device.submissions.clear()


def test_a_queue_with_a_bound(front: FrontEnd) -> None:
    front.device.script = lambda s: Script([1], delay=2.0)
    answers: list[httpx.Response] = []
    shared = httpx.Client(timeout=20)  # making one takes longer than the answer may

    def ask(**fields: Any) -> None:
        body = {"model": MODEL, "prompt": "hi", **fields}
        answers.append(shared.post(front.http + "/v1/completions", json=body))

    clients = [threading.Thread(target=ask, kwargs={"n": 4}) for _ in range(14)]
    for client in clients:
        client.start()
    eventually(lambda: front.device.playing == 40)
    began = time.monotonic()
    ask()
    assert time.monotonic() - began < 0.2
    for client in clients:
        client.join()
    (extra,) = [answer for answer in answers if "n" not in json.loads(answer.request.content)]
    answers.remove(extra)
    assert extra.status_code == 503
    assert int(extra.headers["retry-after"]) >= 1
    statuses = [answer.status_code for answer in answers]
    assert (statuses.count(200), statuses.count(503)) == (10, 4), "40 sequences may wait; n counts"
    front.device.script = lambda s: Script([1])
    assert completion(front).status_code == 200
    front.device.submissions.clear()


def cpu_seconds(front: FrontEnd) -> float:
    """Of the worker; unlike the clock it does not depend on what else the machine does."""
    times = [psutil.Process(pid).cpu_times() for pid in front.workers()]
    return sum(time.user + time.system for time in times)


def test_health_answers_while_much_is_tokenised(front: FrontEnd) -> None:
    longest = max(map(len, tiny_text.tokenizer().get_vocab()))
    text = "." * (256 * longest)  # just below what is refused by its length alone
    asked = [("/v1/completions", {"model": MODEL, "prompt": [text] * 40})] * 3
    asked += [("/v1/completions", {"model": MODEL, "prompt": [[1]] * 400_000})] * 3
    asked += [("/v1/completions", {"model": MODEL, "prompt": [text] * 40, "truncate_prompt_tokens": 9})] * 3
    asked += [("/tokenize", {"prompt": text})] * 3
    with httpx.Client(timeout=60) as shared:
        clients = [
            threading.Thread(target=shared.post, args=(front.http + path,), kwargs={"json": body})
            for path, body in asked
        ]
        for client in clients:
            client.start()
        slowest = 0.0
        while any(client.is_alive() for client in clients):
            began = time.monotonic()
            assert shared.get(front.http + "/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    assert slowest < 1.0


def test_huge_texts_are_refused_unread(front: FrontEnd) -> None:
    before = cpu_seconds(front)
    for prompt in ("." * 1_000_000, "the " * 600):  # by its length, by its beginning
        answer = completion(front, prompt=prompt)
        assert "at least" in refused(front, answer, 400, "prompt", "context_length_exceeded")["message"]
    assert cpu_seconds(front) - before < 0.2


def test_huge_bodies(front: FrontEnd) -> None:
    answer = post(front, "/v1/completions", b" " * (5 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert answer.headers["connection"] == "close"

    def pieces() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * (1 << 20)

    assert httpx.post(front.http + "/v1/completions", content=pieces(), timeout=20).status_code == 413


def test_slow_and_broken_clients(front: FrontEnd) -> None:
    host, port = front.http.removeprefix("http://").split(":")

    def talk(sent: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(sent)
            received = b""
            while part := raw.recv(65536):
                received += part
            return received

    assert talk(b"GET /health HTTP/1.1\r\nHost") == b"", "closed after the header time-out"
    late = talk(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert late.startswith(b"HTTP/1.1 408")
    for broken in (b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n"):
        answer = talk(broken)
        assert answer.startswith(b"HTTP/1.1 400")
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"
    assert talk(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_an_idle_connection_is_kept_for_the_chosen_time(front: FrontEnd) -> None:
    host, port = front.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        for _ in range(2):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += raw.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
            time.sleep(1.0)
        assert raw.recv(65536) == b""
