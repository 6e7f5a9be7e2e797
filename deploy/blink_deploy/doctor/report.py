"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """It serves, but slower, less safely, or nobody knows."""
    FAIL = "fail"
    """It cannot serve in this role, or not rightly."""
    SKIPPED = "skipped"
    """It could not be looked at, or does not matter here; `seen` says why."""


@dataclass(frozen=True)
class Finding:
    """A result, what was seen, and what to do where it is not ok."""

    result: Result
    seen: str
    todo: str = ""


def ok(seen: str) -> Finding:
    """All is well."""
    return Finding(Result.OK, seen)


def warn(seen: str, todo: str) -> Finding:
    """It may go on like this."""
    return Finding(Result.WARN, seen, todo)


def fail(seen: str, todo: str) -> Finding:
    """It may not."""
    return Finding(Result.FAIL, seen, todo)


def skip(reason: str) -> Finding:
    """Nothing is known."""
    return Finding(Result.SKIPPED, reason)


def worst(findings: list[Finding]) -> Finding:
    """Several as one: the worst result, all that was seen, and what to do about those that are that bad."""
    order = [Result.FAIL, Result.WARN, Result.OK, Result.SKIPPED]
    result = min((each.result for each in findings), key=order.index)
    todo = dict.fromkeys(each.todo for each in findings if each.result is result and each.todo)
    return Finding(result, "; ".join(each.seen for each in findings), "; ".join(todo))
