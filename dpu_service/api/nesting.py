"""Limits of JSON values that a request hands through to a template."""

from __future__ import annotations

from typing import Any

from dpu_service.api.errors import bad_value

MOST_LEVELS = 32
"""Lists and objects within each other, so that nothing that walks a value meets Python's recursion limit."""
MOST_VALUES = 1 << 16
MOST_CHARACTERS = 1 << 20


def check_limits(at: str, value: Any, most_characters: int = MOST_CHARACTERS) -> None:
    """Looks at no more of a value than the limits say.

    Args:
        most_characters: of all texts together, the names in objects included.

    Raises:
        ApiError: 400: too deep, too many values, or too much text.
    """
    values = characters = 0
    waiting = [(value, 0)]
    while waiting:
        one, level = waiting.pop()
        values += 1
        if level > MOST_LEVELS:
            raise bad_value(at, f"'{at}' is nested deeper than {MOST_LEVELS} levels")
        if isinstance(one, str):
            characters += len(one)
        elif isinstance(one, dict | list):
            if values + len(waiting) + len(one) > MOST_VALUES:
                raise bad_value(at, f"'{at}' has more than {MOST_VALUES} values")
            inner = one.values() if isinstance(one, dict) else one
            characters += sum(map(len, one)) if isinstance(one, dict) else 0
            waiting += [(item, level + 1) for item in inner]
        if characters > most_characters:
            raise bad_value(at, f"'{at}' has more than {most_characters} characters")
