"""One error for whatever cannot be told."""

from __future__ import annotations


class UnknownError(Exception):
    """Something cannot be looked at here; the message says why."""
