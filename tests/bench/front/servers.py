"""Our HTTP protocols beside uvicorn and Granian: `python -m tests.bench.front.servers` (the extra `bench`).

The same ASGI application (`told`) by each in turn, over TLS and HTTP/1.1, one process with uvloop: 256 streams of 50
tokens/s that all get theirs in one step, and completions of one token. Prints CPU time, of all the process's threads.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from dpu_service.tls import self_signed
from tests.bench.front.reader import Job, to_line
from tests.front_end import ROOT

STREAMS, RATE = 256, 50.0
CONNECTIONS = 64
_APP = "tests.bench.front.told"


@dataclass(frozen=True)
class Server:
    """How it is started; `{port}`, `{certificate}` and `{key}` are put in."""

    name: str
    command: str
    environment: tuple[tuple[str, str], ...] = ()


OURS = Server("ours", f"{_APP} {{port}} {{certificate}} {{key}}")
SERVERS = (
    OURS,
    Server("ours, by ASGI's send", OURS.command, (("BLINK_BY_SEND", "1"),)),
    Server(
        "uvicorn",
        f"uvicorn {_APP}:app --port {{port}} --ssl-certfile {{certificate}} --ssl-keyfile {{key}} "
        "--loop uvloop --http httptools --no-access-log --log-level warning",
    ),
    Server(
        "Granian",
        f"granian {_APP}:app --interface asgi --port {{port}} --ssl-certificate {{certificate}} --ssl-keyfile {{key}} "
        "--loop uvloop --http 1 --workers 1 --no-log",
    ),
)


@dataclass(frozen=True)
class Measured:
    """CPU time of a streamed token and of a completion of one token in µs, and such completions per second."""

    cpu_per_token: float
    cpu_per_answer: float
    per_second: float


def measure(server: Server, seconds: float, streams: int = STREAMS) -> Measured:
    """Starts it, and lets it stream for so long and then answer for so long."""
    with tempfile.TemporaryDirectory() as folder, _running(server, Path(folder), streams) as (url, process):
        result = str(Path(folder) / "arrivals.npy")
        job = Job(url, streams, int(RATE * seconds), False, result, sorted(os.sched_getaffinity(0)))
        reader = [sys.executable, "-m", "tests.bench.front.reader"]
        subprocess.run(reader, input=to_line(job), check=True, cwd=ROOT, timeout=60)
        spent, tokens = json.loads(_get(url + "/spent"))
        caller = [sys.executable, "-m", "tests.bench.front.caller", url, str(CONNECTIONS), str(seconds)]
        before = _cpu_seconds(process)
        done = subprocess.run(caller, check=True, cwd=ROOT, timeout=60, stdout=subprocess.PIPE)
        answers, answering = int(done.stdout), _cpu_seconds(process) - before
    return Measured(1e6 * spent / tokens, 1e6 * answering / answers, answers / seconds)


def _cpu_seconds(process: psutil.Process) -> float:
    """With its workers."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


@contextmanager
def _running(server: Server, folder: Path, streams: int) -> Iterator[tuple[str, psutil.Process]]:
    certificate, key = self_signed(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = server.command.format(port=port, certificate=certificate, key=key).split()
    settings = {"BLINK_STREAMS": str(streams), "BLINK_RATE": str(RATE), "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    environment = {**os.environ, **settings, **dict(server.environment)}
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, env=environment)
    try:
        _wait_for(port)
        yield f"https://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(port: int) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _get(url: str) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(url, context=context) as answer:
        content: bytes = answer.read()
    return content


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of streaming, and of answering, for each")
    seconds = parser.parse_args().seconds
    print(f"| {STREAMS} streams, {CONNECTIONS} connections, TLS | CPU/token | CPU/completion | completions/s |")
    print("|---|---|---|---|")
    for server in SERVERS:
        got = measure(server, seconds)
        spent = f"{got.cpu_per_token:.1f} µs | {got.cpu_per_answer:.0f} µs"
        print(f"| {server.name} | {spent} | {got.per_second:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
