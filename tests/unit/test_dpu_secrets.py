"""Nothing that a client says, and none of its credentials, gets into logs or metrics, nor credentials into answers."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from blink_proto.arena import ErrorCode, Finish
from dpu_service.logs import JsonLines, on_loop_error
from tests import tiny_text
from tests.front_end import MODEL, FrontEnd, eventually, front_end
from tests.replay import Script

PROMPT, ANSWER, KEY, HEADER = "aardvarkprompt", "buffaloanswer", "sk-cheetahkey", "dingoheader"
SECRETS = (PROMPT, ANSWER, KEY, HEADER)
HEADERS = {"authorization": f"Bearer {KEY}", "x-note": HEADER, "cookie": HEADER, "user-agent": HEADER}
CHAT = {"messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}]}
TOOL = {"type": "function", "function": {"name": PROMPT, "parameters": {"type": "object", "description": PROMPT}}}

BODIES: list[dict[str, Any]] = [
    {"prompt": PROMPT},
    {"prompt": PROMPT, "stream": True, "logprobs": 2, "user": PROMPT, "stop": [PROMPT]},
    {"prompt": PROMPT, "echo": True},
    {"prompt": PROMPT, "model": PROMPT},
    {"prompt": PROMPT * 500},
    {"prompt": {PROMPT: PROMPT}},
    {"prompt": PROMPT, "max_tokens": PROMPT},
    {"prompt": PROMPT, "temperature": float("1e300")},
    {"prompt": PROMPT, "logit_bias": {PROMPT: 1}},
    {"prompt": PROMPT, PROMPT: PROMPT},
    {"prompt": [PROMPT, 1]},
    CHAT,
    {**CHAT, "stream": True, "tools": [TOOL]},
    {**CHAT, "tools": [PROMPT]},
    {"messages": [{"role": PROMPT, "content": PROMPT}]},
    {"messages": PROMPT},
    {"messages": [{"role": "user", "content": [{"type": PROMPT, "text": PROMPT}]}]},
]
RAW = [
    f'{{"prompt": "{PROMPT}", '.encode(),
    f'{{"prompt": "{PROMPT}" "x"}}'.encode(),
    PROMPT.encode(),
    b'{"prompt": "' + PROMPT.encode() + b'\xff"}',
    f'"{PROMPT}"'.encode(),
]


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end("--workers", "1", "--log-level", "debug") as running:
        yield running


def requests(front: FrontEnd) -> Iterator[httpx.Response]:
    """The answers to everything above, on both routes and on paths and methods that do not exist."""
    contents = [json.dumps({"model": MODEL, "max_tokens": 20, **body}).encode() for body in BODIES] + RAW
    with httpx.Client(headers=HEADERS, timeout=20, verify=False) as client:
        for content in contents:
            for url in (front.http, front.https):
                yield client.post(url + "/v1/completions", content=content)
                yield client.post(url + "/v1/chat/completions", content=content)
        yield client.post(front.http + "/v1/tokenize", json={"model": MODEL, "prompt": PROMPT})
        yield client.post(front.http + "/tokenize", json={"model": MODEL, "prompt": PROMPT})
        yield client.post(f"{front.http}/v1/{PROMPT}?{HEADER}={KEY}", json={"prompt": PROMPT})
        yield client.get(f"{front.http}/v1/models/{PROMPT}?{HEADER}={KEY}")
        yield client.request(PROMPT[:5].upper(), front.http + "/v1/completions")


def broken_http(front: FrontEnd) -> bytes:
    """The answer to something that is not HTTP."""
    parts = urlsplit(front.http)
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as raw:
        raw.sendall(f"POST /v1/{PROMPT} HTTX\r\nauthorization: {KEY}\r\nx: {HEADER}\r\n\r\n{PROMPT}".encode())
        return raw.recv(65536)


def test_nothing_of_a_request_gets_into_logs_and_metrics(front: FrontEnd) -> None:
    answers: list[str] = []
    for error in (None, ErrorCode.BAD_SAMPLE):
        tokens = tiny_text.ids(ANSWER)
        front.device.script = lambda s, e=error, t=tokens: (  # type: ignore[misc]
            Script(t, Finish.ERROR, error=e, end_apart=True) if e else Script(t, Finish.LENGTH)
        )
        for answer in requests(front):
            answers.append(answer.text)
            assert answer.status_code in (200, 400, 404, 405, 413, 422, 500), answer.text
    answers.append(broken_http(front).decode())
    assert sum(ANSWER in answer for answer in answers) >= 8  # it was served, and is to be found
    assert not [answer for answer in answers if KEY in answer or HEADER in answer]
    metrics = httpx.get(front.http + "/metrics").text
    eventually(lambda: front.log.read_text().count('"route":"/v1/completions"') >= 4 * len(BODIES))
    log = front.log.read_text()
    for secret in SECRETS:
        assert secret not in log, [line for line in log.splitlines() if secret in line][:3]
        assert secret not in metrics


def test_every_line_of_the_log_is_json_with_the_same_beginning(front: FrontEnd) -> None:
    httpx.get(front.http + "/health")  # a probe: at debug level only
    eventually(lambda: '"route":"/health"' in front.log.read_text())
    for line in front.log.read_text().splitlines():
        assert list(json.loads(line))[:4] == ["time", "level", "process", "event"]


def test_a_line_of_the_access_log(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(tiny_text.ids(ANSWER), Finish.LENGTH)
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 20, "stream": True}
    answer = httpx.post(front.http + "/v1/completions", json=body)
    wanted = answer.headers["x-request-id"]

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in front.log.read_text().splitlines() if wanted in line]
        return [line for line in found if line["event"] == "request"]

    eventually(lambda: bool(lines()))
    (line,) = lines()
    assert (line["level"], line["method"], line["route"], line["status"]) == ("info", "POST", "/v1/completions", 200)
    assert (line["client"], line["stream"]) == ("127.0.0.1", True)
    assert line["prompt_tokens"] == 1 + len(tiny_text.ids("hello there"))  # BOS
    assert line["completion_tokens"] == len(tiny_text.ids(ANSWER))
    assert 0 < line["seconds"] < 5


def test_of_an_exception_only_type_and_place_are_logged() -> None:
    def fails() -> None:
        try:
            {}[PROMPT]
        except KeyError as error:
            raise ValueError(f"not {PROMPT}") from error

    formatter = JsonLines("here")
    for failing in (fails, lambda: os.stat("/nonexistent")):
        try:
            failing()
        except (ValueError, OSError):
            record = logging.LogRecord("name", logging.ERROR, "path", 1, "failed", None, sys.exc_info())
        line = json.loads(formatter.format(record))
        assert PROMPT not in line["exception"]
        assert __name__.rpartition(".")[2] + ".py" in line["exception"]
    assert "No such file" in line["exception"]


def test_errors_of_the_event_loop_show_no_objects(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def fails() -> None:
            raise ValueError(PROMPT)

        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        task = asyncio.create_task(fails())
        await asyncio.sleep(0.01)
        del task
        gc.collect()

    caplog.set_level(logging.DEBUG)
    asyncio.run(main())
    (record,) = [one for one in caplog.records if one.name == "asyncio" and one.levelno == logging.ERROR]
    line = JsonLines("here").format(record)
    assert "never retrieved" in line
    assert "ValueError" in line
    assert PROMPT not in line
