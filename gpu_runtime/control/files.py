"""Files that operators change while the runtime serves: seeing that, and saying what came of it."""

from __future__ import annotations

import os
import sys

LOOK_SECONDS = 1.0
Look = tuple[int, int, int, int] | None


def look(path: str) -> Look:
    """What a name leads to, through any links: another value when that has changed, None when nothing is there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def say(text: str) -> None:
    """On standard error, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
