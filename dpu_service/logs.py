"""Logs as JSON lines on standard error. Callers give numbers and names in `extra={"fields": …}`, never prompts.

The message of an unexpected exception may quote what a client sent (a `KeyError` does), so only its type and its place
are told; those of an OSError come from the system.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import traceback
from typing import Any

import msgspec


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = describe(record.exc_info[1])
        return msgspec.json.encode(line, enc_hook=str).decode()


def describe(error: BaseException) -> str:
    """Type and place of an exception and of those behind it, the first one last."""
    parts: list[str] = []
    chain: BaseException | None = error
    while chain is not None and len(parts) < 10:
        message = f": {chain}" if isinstance(chain, OSError) else ""
        parts.append("".join(traceback.format_tb(chain.__traceback__)) + type(chain).__qualname__ + message)
        chain = chain.__cause__ or chain.__context__
    return "\nfrom\n".join(parts)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `loop.set_exception_handler`: asyncio's own handler shows the objects involved."""
    error = context.get("exception")
    logging.getLogger("asyncio").error(context["message"], exc_info=error, extra={"fields": {"of": "event loop"}})


def set_up(process: str, level: str) -> None:
    """Sends all logs of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
