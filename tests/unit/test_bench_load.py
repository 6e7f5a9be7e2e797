"""Open and closed loops, the whole command line, and its reports."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.bench.client import Ask, Client
from tests.bench.connection import Target
from tests.bench.load import Load
from tests.bench.scripted_server import DONE, HEAD, Piece, Script, serving, token, usage, whole


def answer_after(seconds: float) -> Script:
    pieces: list[Piece] = [(0.0, HEAD), (seconds, token("a", "stop") + usage(2, 1) + DONE)]
    return lambda number, body: pieces


def texts() -> Iterator[str]:
    return (f"prompt {number}" for number in count())


def test_open_loop_never_waits_for_answers():
    # Ten arrivals 20 ms apart while each answer takes 400 ms: all must be sent before the first answer.
    async def run() -> None:
        async with serving(answer_after(0.4)) as server:
            client = Client(Target.from_url(server.url), Ask(model="m"))
            load = Load(client, texts())
            await load.open((0.02 * number for number in count()), duration=0.19)
            client.close()
        assert len(load.records) == load.peak_in_flight == 10
        for number, moment in enumerate(sorted(server.arrivals)):
            assert moment - load.start == pytest.approx(0.02 * number, abs=0.15)

    asyncio.run(run())


def test_latency_counts_from_the_scheduled_arrival():
    # The generator itself stands still for 300 ms: the requests that fell due meanwhile show that in their latency.
    async def run() -> None:
        async with serving(answer_after(0.0)) as server:
            client = Client(Target.from_url(server.url), Ask(model="m"))
            load = Load(client, texts())

            def arrivals() -> Iterator[float]:
                yield 0.0
                time.sleep(0.3)
                yield from (0.1, 0.2)

            await load.open(arrivals(), duration=1.0)
            client.close()
        by_due = sorted(load.records, key=lambda record: record.due)
        assert by_due[1].latency >= 0.2
        assert by_due[2].latency >= 0.1
        assert by_due[1].sent - by_due[1].due >= 0.19

    asyncio.run(run())


def test_arrivals_past_the_limit_fail_and_do_not_wait():
    async def run() -> None:
        async with serving(answer_after(0.4)) as server:
            client = Client(Target.from_url(server.url), Ask(model="m"))
            load = Load(client, texts(), limit=3)
            await load.open((0.01 * number for number in count()), duration=0.095)
            client.close()
        errors = [record.error for record in load.records]
        assert (errors.count(""), errors.count("over_limit")) == (3, 7)
        assert (load.peak_in_flight, len(server.bodies)) == (3, 3)

    asyncio.run(run())


def test_closed_loop_keeps_its_streams_busy():
    async def run() -> None:
        async with serving(answer_after(0.05)) as server:
            client = Client(Target.from_url(server.url), Ask(model="m"))
            load = Load(client, texts())
            await load.closed(streams=4, duration=30.0, requests=12)
            client.close()
        assert [record.ok for record in load.records] == [True] * 12
        assert (load.peak_in_flight, server.connections) == (4, 4)
        # Three rounds of 50 ms; one after the other, the twelve would take 600 ms.
        assert 0.149 <= max(record.end for record in load.records) - load.start < 0.5

    asyncio.run(run())


def test_stop_cancels_what_runs_and_keeps_what_ended():
    async def run() -> None:
        script: Script = lambda number, body: answer_after(0.0 if number < 2 else 20.0)(number, body)  # noqa: E731
        async with serving(script) as server:
            client = Client(Target.from_url(server.url), Ask(model="m"))
            load = Load(client, texts())
            asyncio.get_running_loop().call_later(0.3, load.stop)
            await load.open((0.02 * number for number in count()), duration=10.0)
            client.close()
        assert [record.ok for record in load.records] == [True, True]
        assert load.in_flight == 0

    asyncio.run(run())


async def command(server_script: Script, *arguments: str, interrupt_at: int = 0) -> tuple[int, str, str]:
    """Status and output of the command, which gets a SIGINT soon after the server has seen request `interrupt_at`."""
    async with serving(server_script) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.bench",
            "--url",
            server.url,
            *arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        if interrupt_at:
            while len(server.bodies) < interrupt_at:
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()


def completion_or_models(number: int, body: dict[str, Any]) -> list[Piece]:
    if "prompt" not in body:
        return [(0.0, whole("200 OK", {"data": [{"id": "tiny"}]}))]
    return [(0.0, HEAD), (0.02, token("a")), (0.02, token("b", "stop") + usage(16, 2) + DONE)]


def test_command_writes_table_and_json(tmp_path: Path):
    path = tmp_path / "out.json"
    arguments = ["--rate", "20", "--duration", "10", "--requests", "8", "--prompt-tokens", "16", "--json", str(path)]
    status, out, err = asyncio.run(command(completion_or_models, *arguments, "--slo-ttft-ms", "5000"))
    assert status == 0, err
    assert "8 of 8 succeeded" in out
    assert "goodput" in out
    document = json.loads(path.read_text())
    assert document["settings"]["model"] == "tiny"
    assert document["summary"]["output_tokens"] == 16
    assert document["summary"]["goodput"]["share"] == 1.0
    assert len(document["requests"]) == 8
    assert {"date", "versions", "machine"} <= document.keys()
    assert "prompt" not in document["requests"][0]


def test_command_fails_where_nothing_succeeds():
    refuse: Script = lambda number, body: [(0.0, whole("503 Service Unavailable", {"error": {}}))]  # noqa: E731
    arguments = ["--model", "m", "--streams", "1", "--requests", "2"]
    assert asyncio.run(command(refuse, *arguments))[0] == 2
    status, out, _ = asyncio.run(command(refuse, *arguments, "--warmup", "0"))
    assert status == 1
    assert "http_503: 2" in out


def test_ctrl_c_reports_what_was_measured():
    script: Script = lambda number, body: answer_after(0.0 if number < 3 else 60.0)(number, body)  # noqa: E731
    arguments = ["--model", "m", "--streams", "1", "--warmup", "0", "--duration", "60"]
    status, out, err = asyncio.run(command(script, *arguments, interrupt_at=4))
    assert status == 0, err
    assert "3 of 3 succeeded" in out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--rate", "1", "--streams", "1"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--streams", "0"],
        ["--rate", "1", "--no-stream", "--slo-ttft-ms", "5"],
        ["--rate", "1", "--extra-body", "[1]"],
        ["--rate", "1", "--api-key-env", "BLINK_TEST_UNSET"],
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    from tests.bench.options import parse

    with pytest.raises(SystemExit, match="2"):
        parse(["--url", "http://127.0.0.1:1", *arguments])
    assert "error:" in capsys.readouterr().err
