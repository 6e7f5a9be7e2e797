"""Limits of JSON values that a request hands through to a template."""

from __future__ import annotations

from typing import Any

MOST_NESTED = 32
"""Levels of lists and objects, so that nothing that walks a value meets Python's recursion limit."""


def is_nested_deeply(value: Any) -> bool:
    """Whether it has more levels than `MOST_NESTED`."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return False
    return True


def size(value: Any) -> int:
    """Characters of all texts, keys included, and 1 for each value."""
    total, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        total += 1 + (len(one) if isinstance(one, str) else 0)
        if isinstance(one, dict):
            total += sum(map(len, one))
        waiting += _inside(one)
    return total


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
