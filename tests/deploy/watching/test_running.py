"""`blinkctl watch` beside both programs, while requests run."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from blink_deploy.client import ControlClient
from blink_proto import control_pb2
from blink_proto.dial import Dial
from tests.control import CTL, ctl
from tests.e2e.serving import Serving, free_port, serving
from tests.tiny import save_tiny

TOKENS = 40


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, str(save_tiny(folder / "model", "llama")), "tiny", ("--kv-tokens", "2048")) as started:
        yield started


def ask(served: Serving) -> int:
    """A request; the tokens that it got."""
    request = {"model": "tiny", "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True}
    answer = httpx.post(f"{served.http}/v1/completions", json=request, timeout=60).json()
    return int(answer["usage"]["completion_tokens"])


def watched(served: Serving, *arguments: str) -> list[dict[str, Any]]:
    """What it says in JSON while two requests run."""
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(ask(served))) for _ in range(2)]
    told = ["--runtime", served.control, "-o", "json", "watch", "--seconds", "4", *arguments]
    process = subprocess.Popen([*CTL, *told], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    for thread in threads:
        thread.start()
    rest, _ = process.communicate(timeout=60)
    for thread in threads:
        thread.join()
    assert (process.returncode, got) == (0, [TOKENS, TOKENS])
    return [json.loads(line) for line in [first, *rest.splitlines()]]


def test_rates_and_latencies_are_those_of_the_requests(served: Serving) -> None:
    said = watched(served, "--interval", "0.2", "--metrics-url", f"{served.http}/metrics")
    assert len(said) >= 5
    assert {line["phase"] for line in said} == {"PHASE_SERVING"}
    counted = [int(line["telemetry"]["generated_tokens"]) for line in said]
    assert counted[-1] - counted[0] == 2 * TOKENS
    assert said[0]["rates"] is None
    assert max(line["rates"]["generated"] for line in said[1:]) > 0
    queried = [int(line["telemetry"]["prefix_queries"]) for line in said]
    assert queried[-1] > queried[0], "the cache was asked for the prompts"
    ended = [int(line["telemetry"]["finished_length"]) for line in said]
    assert ended[-1] - ended[0] == 2
    last = said[-1]
    assert last["fault"] == ""
    for name in ("first_token", "per_token"):
        assert 0 < last[name]["p50"] <= last[name]["p99"]
    assert last["queued"] == 0


def test_json_without_an_interval_is_changes_only(served: Serving) -> None:
    (line,) = ctl("--runtime", served.control, "-o", "json", "watch", "--seconds", "1").stdout.splitlines()
    assert json.loads(line).keys() == {"phase", "epoch", "model", "detail", "life"}


def test_lines_without_a_terminal(served: Serving) -> None:
    told = ["--runtime", served.control, "watch", "--seconds", "1.5", "--interval", "0.3"]
    said = ctl(*told, "--metrics-url", f"http://127.0.0.1:{free_port()}/metrics").stdout.splitlines()
    assert len(said) >= 2
    for line in said:
        assert re.fullmatch(
            r"epoch 1  serving  tiny  out \S+/s  in \S+/s  ended \S+/s  running 0  waiting 0  kv 0.0 % \(0/\d+\)  "
            r"cached –  metrics: .*Connection refused.*",
            line,
        ), line


def test_a_terminal_is_refreshed_in_place(served: Serving) -> None:
    """On a pseudo-terminal, until Ctrl-C."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    told = ["--runtime", served.control, "watch", "--interval", "0.2", "--metrics-url", f"{served.http}/metrics"]
    process = subprocess.Popen([*CTL, *told], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    said = b""
    deadline = time.monotonic() + 30
    while said.count(b"generated tokens/s") < 3:
        assert time.monotonic() < deadline, said
        said += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    os.close(master)
    text = said.decode()
    # The cursor goes up again over what was written, whose lines are erased.
    assert re.search(r"\x1b\[1A\x1b\[2K", text)
    assert "first token P50/P99" in text
    assert "tiny  serving  epoch 1" in text


def test_metrics_that_need_a_key_are_asked_with_it(tmp_path: Path, served: Serving) -> None:
    """Against a server that shows what it was asked with."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["authorization"])
            self.send_response(401)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "key").write_text("blink-secret\n")
    told = ["--runtime", served.control, "watch", "--seconds", "1", "--metrics-key-file", str(tmp_path / "key")]
    said = ctl(*told, "--metrics-url", f"http://127.0.0.1:{server.server_port}/metrics")
    server.shutdown()
    server.server_close()
    assert set(seen) == {"Bearer blink-secret"}
    assert "metrics: status 401" in said.stdout
    assert "blink-secret" not in said.stdout + said.stderr


def test_wrong_usage(served: Serving) -> None:
    said = ctl("--runtime", served.control, "watch", "--metrics-url", "file:///etc/passwd", status=2)
    assert "http" in said.stderr


def test_a_state_comes_no_more_often_than_every_tenth_of_a_second(served: Serving) -> None:
    with ControlClient(Dial(served.control)) as client:
        seen: list[control_pb2.State] = []
        with pytest.raises(grpc.RpcError) as over:
            seen.extend(client.watch(1.05, every=0.001))
    assert over.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 2 <= len(seen) <= 12
