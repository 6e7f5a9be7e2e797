"""Several workers: one dies and the others' streams go on; the end is announced before it comes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx

from blink_proto.arena import Finish
from tests import tiny_text
from tests.front_end import ROOT, eventually, front_end
from tests.raw_http import body, dial, post, read_all, read_until
from tests.replay import Script

FOREVER = tiny_text.byte_ids(b"x" * 200)


def test_a_worker_that_dies_hurts_no_other() -> None:
    with front_end("--workers", "2") as front:
        front.device.script = lambda s: Script(FOREVER[:60], Finish.STOP, every=0.05)
        by_prompt: dict[int, socket.socket] = {}
        while len({asked.channel for asked in front.device.submissions}) < 2:
            prompt = 65 + len(by_prompt)
            raw = by_prompt[prompt] = dial(front.http)
            raw.sendall(post(body(prompt=[prompt], stream=True)))
            read_until(raw, b"data: ")
        channels = {asked.prompt[0]: asked.channel for asked in front.device.submissions}
        first, second = front.workers()
        os.kill(first, signal.SIGKILL)
        whole = {prompt: read_all_of_stream(raw) for prompt, raw in by_prompt.items()}
        served = {prompt for prompt, received in whole.items() if received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")}
        assert served == {prompt for prompt, channel in channels.items() if channel == 1}
        assert all(b'"finish_reason":"stop"' in whole[prompt] for prompt in served)
        eventually(lambda: [channel.lease for channel in front.device.channels[:2]] == [2, 1], timeout=10)
        front.device.script = lambda s: Script([*tiny_text.ids("ok"), tiny_text.special(tiny_text.END)])
        front.device.submissions.clear()
        eventually(lambda: second in front.workers() and len(front.workers()) == 2)

        def both_serve() -> bool:
            assert httpx.post(front.http + "/v1/completions", content=body()).json()["choices"][0]["text"] == "ok"
            return {asked.channel for asked in front.device.submissions} == {0, 1}

        eventually(both_serve, timeout=20)
        text = httpx.get(front.http + "/metrics").text
        assert re.search(r"^blink_workers_ready 2\.0$", text, re.MULTILINE)


def read_all_of_stream(raw: socket.socket) -> bytes:
    """To its end, or to that of the connection."""
    return read_until(raw, b"0\r\n\r\n")


def test_probes_hear_of_the_end_before_it_comes() -> None:
    with front_end("--workers", "1", "--unready", "1") as front:
        front.device.script = lambda s: Script([*tiny_text.ids("ok"), tiny_text.special(tiny_text.END)])
        front.process.terminate()
        began = time.monotonic()
        eventually(lambda: httpx.get(front.http + "/ready").status_code == 503, timeout=1)
        assert httpx.post(front.http + "/v1/completions", content=body()).status_code == 200
        assert front.process.wait(10) == 0
        assert time.monotonic() - began > 0.9


def test_answers_at_the_end_close_their_connections() -> None:
    with front_end("--workers", "1", "--grace", "10") as front:
        front.device.script = lambda s: Script(FOREVER[:20], Finish.STOP, every=0.05)
        streaming, idle = dial(front.http), dial(front.http)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"connection" not in read_until(idle, b"}")
        streaming.sendall(post(body(stream=True)))
        read_until(streaming, b"data: ")
        front.process.terminate()
        time.sleep(0.3)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"connection: close" in read_all(idle), "any route, not completions alone"
        assert b"data: [DONE]" in read_all(streaming)
        assert front.process.wait(10) == 0


def test_without_the_package_for_http2_there_is_http1() -> None:
    script = "import sys; sys.modules['h2'] = None; from dpu_service.http.choose import ALPN; print(ALPN)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout.strip() == "['http/1.1']"
