"""Starts the two programs as child processes and waits until they say that they are ready."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field


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
    def start(cls, name: str, module: str, arguments: list[str]) -> Program:
        """Starts `python -m module` in a process group of its own, so that Ctrl-C reaches only the starter."""
        ready, child_end = os.pipe()
        command = [sys.executable, "-m", module, *arguments, "--ready-fd", str(child_end)]
        process = subprocess.Popen(command, pass_fds=(child_end,), start_new_session=True)
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

    def stop(self, seconds: float) -> int:
        """SIGTERM, then SIGKILL when the time is over; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def wait_ready(programs: list[Program], seconds: float) -> None:
    """Waits until all are ready.

    Raises:
        StartError: one ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    waiting = list(programs)
    while waiting:
        if time.monotonic() > deadline:
            names = ", ".join(program.name for program in waiting)
            raise StartError(f"not ready after {seconds:.0f} s: {names}")
        waiting = [program for program in waiting if not program.poll_ready(0.1)]
        for program in programs:
            if program.process.poll() is not None:
                raise StartError(f"{program.name} ended with status {program.process.returncode}")


def wait_first_end(programs: list[Program]) -> Program:
    """Waits until one of them ends."""
    while True:
        for program in programs:
            if program.process.poll() is not None:
                return program
        time.sleep(0.2)
