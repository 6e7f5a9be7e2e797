"""Both programs behind `blink up`, on free ports, with the front end on cores of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tests.bench.gpu.cores import Cores, pin
from tests.shapes import write_folder

START_SECONDS = 150.0
STOP_SECONDS = 30.0


class NotServing(RuntimeError):
    """`blink up` ended, or took too long; the message has its last output."""


@dataclass(frozen=True)
class Served:
    """A running `blink up`."""

    process: subprocess.Popen[bytes]
    url: str
    control: str
    ready_seconds: float
    output: IO[bytes]

    def children(self, part: str) -> list[int]:
        """Ids of the processes below whose command line names a module of that package."""
        tree = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in tree if any(word.startswith(f"{part}.") for word in child.cmdline())]

    def stoppable(self, device: str) -> list[int]:
        """The GPU runtime's processes; on the CPU without the chain's own, which stands for the GPU."""
        runtime = self.children("gpu_runtime")
        chain = [pid for pid in runtime if any("gpu_runtime.chain" in word for word in psutil.Process(pid).cmdline())]
        return [pid for pid in runtime if pid not in chain] if device == "cpu" else runtime

    def keep_apart(self, cores: Cores) -> None:
        """The front end on its own cores, everything else on the rest."""
        for pid in (self.process.pid, *self.children("gpu_runtime")):
            pin(pid, cores.rest)
        for pid in self.children("dpu_service"):
            pin(pid, cores.front_end)

    def said(self) -> str:
        """The end of what both programs have said."""
        self.output.seek(0)
        return self.output.read()[-3000:].decode(errors="replace")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def serve(arguments: Sequence[str], seconds: float = START_SECONDS) -> Iterator[Served]:
    """Starts `blink up`, waits until it is ready, stops it in the end.

    Raises:
        NotServing: it is not ready in time.
    """
    https, grpc = free_ports(2)
    ports = ["--https-port", str(https), "--http-port", "0", "--grpc-port", str(grpc)]
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        command = [sys.executable, "-m", "blink_deploy.main", "up", *ports, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        started = Served(process, f"https://127.0.0.1:{https}", f"127.0.0.1:{grpc}", 0.0, output)
        try:
            _wait_ready(started, began + seconds)
            yield Served(process, started.url, started.control, time.monotonic() - began, output)
        finally:
            _stop(process)


def shape_arguments(folder: Path, device: str, shape: str) -> tuple[list[str], str]:
    """Arguments of `blink up` for a model of a shape with random weights, and the name it is served under.

    On the CPU a small random model takes its place: the soft GPU computes with real weights only.
    """
    name = shape.lower()
    if device == "cpu":
        from tests.tiny import save_tiny

        return ["--device", "cpu", "--model", str(save_tiny(folder / name, "llama")), "--name", name], name
    model = write_folder(folder / name, shape)
    return ["--device", device, "--random-weights", "--model", str(model), "--name", name], name


def is_ready(url: str) -> bool:
    """Whether `/ready` says so."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _wait_ready(started: Served, deadline: float) -> None:
    while not is_ready(started.url):
        if started.process.poll() is not None or time.monotonic() > deadline:
            raise NotServing(f"blink up did not get ready:\n{started.said()}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    tree = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
