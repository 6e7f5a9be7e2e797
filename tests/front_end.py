"""Runs the real `blink-dpu` against a replay device, with real processes and sockets."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blink_proto import arena
from tests import tiny_text
from tests.replay import ReplayControl, ReplayDevice

ROOT = Path(__file__).resolve().parent.parent
MODEL = "tiny"
WINDOW = 256
SIZES = arena.Sizes(channels=4, submit_slots=64, cancel_slots=64, log_slots=256, heap_tokens=4096)


def make_device(epoch: int = 1, sizes: arena.Sizes = SIZES, window: int = WINDOW) -> ReplayDevice:
    """A running device for the tiny tokenizer."""
    device = ReplayDevice(sizes, tiny_text.vocab_size(), window, epoch)
    device.start()
    return device


@dataclass
class FrontEnd:
    """A running `blink-dpu`."""

    process: subprocess.Popen[bytes]
    device: ReplayDevice
    control: ReplayControl
    https: str
    http: str
    certificate: str
    log: Path

    def stop(self, timeout: float = 20) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


def launch(port: int, folder: Path, *flags: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts the process; its log goes to a file."""
    log = folder / "log"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    command = [sys.executable, "-m", "dpu_service.main", "--runtime", f"127.0.0.1:{port}"]
    command += ["--https", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", str(folder), *flags]
    with log.open("wb") as stderr:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, cwd=folder), log


def ready_line(process: subprocess.Popen[bytes], log: Path, timeout: float = 30) -> list[str]:
    """The URLs of the line that says so."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout)[0]:
        raise AssertionError(f"not ready in time: {log.read_text()}")
    line = process.stdout.readline().decode().split()
    assert line[:1] == ["ready"], log.read_text()
    return line[1:]


@contextmanager
def front_end(
    *flags: str, device: ReplayDevice | None = None, files: dict[str, bytes] | None = None
) -> Iterator[FrontEnd]:
    """A front end that is ready; everything is gone afterwards. `files` are the tokenizer's."""
    device = device or make_device()
    control = ReplayControl(MODEL, files or tiny_text.files(), device)
    port = control.start()
    with tempfile.TemporaryDirectory() as folder:
        process, log = launch(port, Path(folder), *flags)
        try:
            https, http = ready_line(process, log)
            yield FrontEnd(process, device, control, https, http, f"{folder}/tls-cert.pem", log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            control.stop()
            device.close()


def eventually(true: Callable[[], bool], timeout: float = 5) -> None:
    """Waits until something holds."""
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)
