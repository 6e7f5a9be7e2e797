"""Where the runtime's own log lines go: to standard error, as they are, with their fields behind."""

from __future__ import annotations

import logging
import sys


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f", {name}: {value}" for name, value in getattr(record, "fields", {}).items())
        return f"{record.getMessage()}{fields}"


def set_up() -> None:
    """For this package's loggers; what libraries log stays with Python's defaults."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    ours = logging.getLogger("gpu_runtime")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.INFO)
