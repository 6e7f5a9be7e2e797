"""The time that a client gives a request ends it everywhere: in the answer, in the queue and on the device."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from blink_proto.arena import Finish
from tests import tiny_text
from tests.front_end import FrontEnd, eventually, front_end
from tests.raw_http import body, dial, post, read_all, read_until
from tests.replay import Script

FOREVER = tiny_text.byte_ids(b"x" * 200)


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    with front_end("--workers", "1", "--write-timeout", "30") as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    shared.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.05)
    yield shared
    shared.device.taking = True
    eventually(lambda: shared.device.playing == 0)


def ask(front: FrontEnd, seconds: str) -> httpx.Response:
    given = {"X-Request-Timeout": seconds}
    return httpx.post(front.http + "/v1/completions", content=body(n=2), headers=given, timeout=20)


def test_a_whole_answer(front: FrontEnd) -> None:
    cancelled = front.device.finished[Finish.CANCELLED]
    began = time.monotonic()
    answer = ask(front, "0.5")
    assert 0.4 < time.monotonic() - began < 2
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    eventually(lambda: front.device.finished[Finish.CANCELLED] == cancelled + 2, timeout=2)


def test_a_stream(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(post(body(stream=True), "X-Request-Timeout: 0.5"))
    received = read_until(raw, b"0\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200")
    assert b'"code":"deadline_exceeded"' in received
    assert received.count(b"data: [DONE]\n\n") == 1
    eventually(lambda: front.device.playing == 0, timeout=2)


def test_in_the_queue(front: FrontEnd) -> None:
    front.device.taking = False
    assert ask(front, "0.3").status_code == 504


def test_while_the_body_comes(front: FrontEnd) -> None:
    raw = dial(front.http)
    raw.sendall(post(body(), "X-Request-Timeout: 0.3")[:-5])
    assert read_all(raw).startswith(b"HTTP/1.1 504")


def test_while_the_client_does_not_read(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER, Finish.NONE, every=0.02)
    raw = dial(front.http, receive_buffer=2048)
    raw.sendall(post(body(stream=True, n=4, logprobs=20, max_tokens=240), "X-Request-Timeout: 3"))
    eventually(lambda: front.device.playing == 4)
    eventually(lambda: front.device.playing == 0, timeout=5)
    assert front.device.finished[Finish.LENGTH] == 0
    raw.close()


def test_time_enough(front: FrontEnd) -> None:
    front.device.script = lambda s: Script(FOREVER[:3], Finish.STOP)
    assert ask(front, "10").status_code == 200


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "1e9", ""])
def test_no_time_at_all(front: FrontEnd, seconds: str) -> None:
    answer = ask(front, seconds)
    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["param"] == "X-Request-Timeout"
