"""Files that operators change while the runtime serves: seeing that, and saying what came of it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
Look = tuple[int, int, int, int] | None


def look(path: str) -> Look:
    """What a name leads to, through any links: another value when that has changed, None when nothing is there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


async def again_and_again(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Does work for ever, which waits for its time itself. What fails is logged, once while it stays the same."""
    said = ""
    while True:
        try:
            await work()
            said = ""
        except Exception as error:  # whatever it is: nobody would notice that nobody looks any more
            if (failed := f"{type(error).__name__}: {error}") != said:
                log.error("%s failed, and is tried again: %s", what, failed)
            said = failed


def say(text: str) -> None:
    """On standard error, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
