"""Starts the two programs as child processes and waits until they say that they are ready."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import FrameType

_PR_SET_PDEATHSIG = 1


class StartError(RuntimeError):
    """A program ended before it was ready."""


@dataclass
class Program:
    """One child process. It writes a line to `ready` (a pipe) once it serves."""

    name: str
    process: subprocess.Popen[bytes]
    ready: int
    said: bytes = field(default=b"")

    @classmethod
    def start(cls, name: str, module: str, arguments: list[str], environment: dict[str, str] | None = None) -> Program:
        """Starts `python -m module` in a process group of its own, so that Ctrl-C reaches only the starter.

        Args:
            environment: variables beside those of this process.
        """
        ready, child_end = os.pipe()
        command = [sys.executable, "-m", module, *arguments, "--ready-fd", str(child_end)]
        process = subprocess.Popen(
            command,
            pass_fds=(child_end,),
            start_new_session=True,
            preexec_fn=_end_with_the_starter,
            env={**os.environ, **(environment or {})},
        )
        os.close(child_end)
        return cls(name, process, ready)

    def poll_ready(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the line.

        Raises:
            StartError: the program has ended.
        """
        if self.said.endswith(b"\n"):
            return True
        readable, _, _ = select.select([self.ready], [], [], timeout)
        if readable:
            self.said += os.read(self.ready, 4096)
        if not self.said.endswith(b"\n") and (self.process.poll() is not None or (readable and not self.said)):
            raise StartError(f"{self.name} ended with status {self.process.wait()} before it was ready")
        return self.said.endswith(b"\n")

    def ended(self) -> bool:
        """The process is gone."""
        return self.process.poll() is not None

    def ask_to_stop(self) -> None:
        """SIGTERM."""
        if not self.ended():
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL for it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _end_with_the_starter() -> None:
    """In the child: SIGTERM when the process that started it is gone, however it ended (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class StopSignals:
    """Counts SIGINT and SIGTERM from now on: one asks to stop, a second one to stop at once."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def wait_ready(programs: list[Program], signals: StopSignals, seconds: float) -> bool:
    """Waits until all are ready; False when a signal came first.

    Raises:
        StartError: one ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    waiting = list(programs)
    while waiting and not signals.count:
        if time.monotonic() > deadline:
            names = ", ".join(program.name for program in waiting)
            raise StartError(f"not ready after {seconds:.0f} s: {names}")
        waiting = [program for program in waiting if not program.poll_ready(0.1)]
        for program in programs:
            if program.ended():
                raise StartError(f"{program.name} ended with status {program.process.returncode}")
    return not waiting


def wait_first_end(programs: list[Program], signals: StopSignals) -> Program | None:
    """Waits until one of them ends, or a signal comes (None)."""
    while not signals.count:
        for program in programs:
            if program.ended():
                return program
        time.sleep(0.2)
    return None


def stop_all(programs: list[Program], signals: StopSignals, seconds: float) -> None:
    """Ends them one after the other, each within `seconds`, or at once on a second signal."""
    for program in programs:
        program.ask_to_stop()
        deadline = time.monotonic() + seconds
        while not program.ended() and time.monotonic() < deadline and signals.count < 2:
            time.sleep(0.05)
        program.kill()
