"""The audit log: one JSON line for every administrative call and for every call that a role was refused."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_runtime.control.caller import Caller

STANDARD_ERROR = "-"
_TOLD = ("source", "name", "replace", "grace_seconds", "resume", "front_end", "channels", "transport")
"""Fields of requests that are told. What is not here, as what a front end offers to connect with, may be a secret."""
_LONGEST = 512


@dataclass
class Entry:
    """A call that begins."""

    method: str
    caller: Caller
    request: Any = None
    """None: not told, or it did not come."""
    began: float = field(default_factory=time.monotonic)


class Audit:
    """Appends lines to a file, which may be moved away or removed at any time, or to standard error.

    Args:
        path: of the file (made with mode 0600), or `-`.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = None if path == STANDARD_ERROR else Path(path)
        if self._path is not None:
            _append(self._path, b"")

    def write(self, entry: Entry, outcome: str) -> None:
        """A call has ended. A file that cannot be written now does not stop the runtime: the line goes to standard
        error, with the reason.
        """
        line = (json.dumps(_fields(entry, outcome)) + "\n").encode()
        if self._path is not None:
            try:
                _append(self._path, line)
                return
            except OSError as error:
                sys.stderr.write(f"cannot write the audit log {self._path}: {error.strerror}\n")
        sys.stderr.write(line.decode())
        sys.stderr.flush()


def _fields(entry: Entry, outcome: str) -> dict[str, Any]:
    now, caller = time.time(), entry.caller
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z",
        "event": "audit",
        "method": entry.method,
        "outcome": outcome,
        "seconds": round(time.monotonic() - entry.began, 3),
        "role": caller.shown_role,
        "subject": caller.subject,
        "fingerprint": caller.fingerprint,
        "peer": caller.peer,
        "request": {name: _short(getattr(entry.request, name)) for name in _TOLD if hasattr(entry.request, name)},
    }


def _short(value: str | int | bool) -> str | int | bool:
    return value[:_LONGEST] if isinstance(value, str) else value


def _append(path: Path, line: bytes) -> None:
    """In one write, so that lines of several writers do not mix."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
