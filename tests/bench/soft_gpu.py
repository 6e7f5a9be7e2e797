"""Measures the soft GPU end to end: starts `blink up`, loads it with closed loops, stops it.

`python -m tests.bench.soft_gpu [--streams 1,8] [--json FILE] [arguments of blink up, for example --model FOLDER]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import psutil
from rich.console import Console

from tests.bench import report
from tests.bench.arrivals import prompts
from tests.bench.client import Ask, Client, first_model
from tests.bench.connection import ConnectionLost, Target
from tests.bench.load import Load
from tests.bench.stats import Summary, summarise

START_SECONDS = 600.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.1


class ServerEnded(RuntimeError):
    """`blink up` ended before it was ready."""


@dataclass(frozen=True)
class Server:
    """A running `blink up`."""

    process: subprocess.Popen[bytes]
    url: str
    ready_seconds: float

    def memory_bytes(self) -> int:
        """Proportional set size of all its processes: what they share counts once."""
        total = 0
        parent = psutil.Process(self.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return total


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[Server]:
    """Starts `blink up` on free ports, waits until it lists a model, and stops it in the end.

    Raises:
        ServerEnded: it ended before; its last output is in the message.
    """
    https, grpc = free_ports(2)
    ports = ["--https-port", str(https), "--http-port", "0", "--grpc-port", str(grpc)]
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        command = [sys.executable, "-m", "blink_deploy.main", "up", *ports, *arguments]
        # Other users than root could not see what processes take that hide their memory.
        seen = {**os.environ, "BLINK_CORE_DUMPS": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=seen)
        try:
            url = f"https://127.0.0.1:{https}"
            _wait_ready(process, url, output, began + START_SECONDS)
            yield Server(process, url, time.monotonic() - began)
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, output: IO[bytes], deadline: float) -> None:
    target = Target.from_url(url, insecure=True)
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            output.seek(0)
            raise ServerEnded(f"blink up did not get ready:\n{output.read()[-2000:].decode(errors='replace')}")
        try:
            asyncio.run(first_model(target))
            return
        except (OSError, ConnectionLost, ValueError):
            time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def closed_loop(url: str, ask: Ask, streams: int, prompt_tokens: int) -> Summary:
    """One request on each stream, all at once, after one request alone that warms up."""
    client = Client(Target.from_url(url, insecure=True), ask)
    texts = prompts(prompt_tokens, seed=streams)
    await client.measure(next(texts), asyncio.get_running_loop().time())
    load = Load(client, iter(list(islice(texts, streams))))
    await load.closed(streams, duration=START_SECONDS, requests=streams)
    client.close()
    return summarise(load.records, load.start)


def run(arguments: argparse.Namespace, server_arguments: Sequence[str], console: Console) -> dict[str, object]:
    """The whole measurement, as the JSON report holds it."""
    console.print("starting blink up", style="dim")
    with serving(server_arguments) as server:
        target = Target.from_url(server.url, insecure=True)
        ask = Ask(asyncio.run(first_model(target)), max_tokens=arguments.max_tokens, extra=arguments.extra_body)
        runs = {}
        for streams in arguments.streams:
            runs[str(streams)] = asyncio.run(closed_loop(server.url, ask, streams, arguments.prompt_tokens))
            report.show(runs[str(streams)], console, title=f"{ask.model}, {streams} stream{'s'[: streams > 1]}")
        memory = server.memory_bytes()
    console.print(f"ready after {server.ready_seconds:.1f} s; {memory / 2**30:.2f} GiB in all processes together")
    return {
        "machine": report.machine(),
        "versions": report.versions(),
        "ready_seconds": server.ready_seconds,
        "memory_bytes": memory,
        "streams": {streams: asdict(summary) for streams, summary in runs.items()},
    }


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 when the server does not start."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soft_gpu", description=__doc__)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments, server_arguments = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is stopped too
    try:
        result = run(arguments, server_arguments, Console())
    except ServerEnded as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
