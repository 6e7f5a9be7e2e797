"""Starts both programs for a test, as `blink up` does for a user, and looks at their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil

from tests.peeping import give_up_tracing

READY_SECONDS = 120


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on at the moment."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@dataclass
class Serving:
    """Both programs behind `blink up`."""

    process: subprocess.Popen
    https: str
    http: str
    control: str
    model: str
    log: Path

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http}/v1", api_key="unused", max_retries=0, **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.http}/v1", api_key="unused", max_retries=0, timeout=240)

    def child(self, module: str) -> psutil.Process:
        """The process below that runs `python -m module`."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if module in process.cmdline():
                return process
        raise LookupError(f"no process runs {module}")

    def metric(self, name: str) -> float:
        """The value of a series without labels."""
        for line in httpx.get(f"{self.http}/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise LookupError(name)

    def wait_metric(self, name: str, value: float, seconds: float = 15) -> None:
        """Waits until a series has a value."""
        deadline = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def serving(folder: Path, model: str, name: str = "", arguments: tuple[str, ...] = (), **environment: str):
    """A running server; killed at the end when the test has not stopped it."""
    https, http, control = free_port(), free_port(), free_ports(2)  # a second runtime takes the next one
    log = folder / "serving.log"
    command = [sys.executable, "-m", "blink_deploy.main", "up", "--model", model, "--name", name]
    command += ["--https-port", str(https), "--http-port", str(http), "--grpc-port", str(control), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}, preexec_fn=give_up_tracing
        )
    started = Serving(
        process,
        f"https://127.0.0.1:{https}",
        f"http://127.0.0.1:{http}",
        f"127.0.0.1:{control}",
        name or model,
        log,
    )
    try:
        _wait_ready(started)
        yield started
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for child in children:
            child.resume()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
        for child in children:
            if child.is_running():
                child.kill()


def _wait_ready(started: Serving) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while b"Blink serves" not in started.log.read_bytes():
        said = started.log.read_text(errors="replace")[-3000:]
        assert started.process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
