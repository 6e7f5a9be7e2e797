"""Certificates that are refused whatever their authority says, by a file that may be changed at any time.

A line each: the SHA-256 of a certificate in hexadecimal (colons do not matter), which refuses that one, or a subject,
which also refuses those that come after it: as `blinkctl certs show` tells it, or in quotes with JSON's escapes, as the
audit log does. Empty lines and lines that begin with `#` say nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpu_runtime.control.files import look, say
from gpu_runtime.control.patience import in_thread

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class ListError(ValueError):
    """The file cannot be read, or a line of it says nothing that is known."""


class RefusedCertificates:
    """See the module. Nobody is refused without a file.

    Raises:
        ListError: the file cannot be used.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._seen = look(path)
        self._refused = _read(path) if path else frozenset()

    def has(self, subject: str, fingerprint: str) -> bool:
        """Whether a certificate is refused."""
        return bool(self._refused) and (fingerprint in self._refused or subject in self._refused)

    async def look(self) -> None:
        """Takes the file up if it is another one than before. What cannot be used changes nothing and is said once."""
        now = look(self._path)
        if now == self._seen:
            return
        try:
            self._refused = await in_thread(lambda: _read(self._path))
            news = f"took up a list of refused certificates: {len(self._refused)}"
        except ListError as error:
            news = f"kept the old list of refused certificates: {error}"
        self._seen = now
        say(news)


def _read(path: str) -> frozenset[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ListError(f"{path}: {reason}") from error
    found = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    return frozenset(_entry(path, number, line) for number, line in found if line and not line.startswith("#"))


def _entry(path: str, number: int, line: str) -> str:
    plain = line.replace(":", "").lower()
    if _FINGERPRINT.fullmatch(plain):
        return plain
    subject = _unquoted(line) if line.startswith('"') else line
    if "=" in subject:
        return subject
    raise ListError(f"{path}, line {number}: neither the SHA-256 of a certificate nor a subject (CN=…)")


def _unquoted(line: str) -> str:
    """A JSON string; empty where it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""
