"""Keeps what is marked `debug_redact` out of messages' `str` and `repr`: protobuf's own have it, in Python.

What turns a message into text on purpose (`text_format`, `json_format`) is not held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def redact(descriptor: Any, classes: Mapping[str, Any]) -> None:
    """From now on neither `str` nor `repr` of these messages tells such fields.

    Args:
        descriptor: of a `.proto` file.
        classes: of its messages, by name.
    """
    for name, message in descriptor.message_types_by_name.items():
        secret = [field.name for field in message.fields if field.GetOptions().debug_redact]
        if secret:
            made = classes[name]
            for told in ("__repr__", "__str__"):
                setattr(made, told, _without(secret, getattr(made, told)))


def _without(secret: list[str], tell: Callable[[Any], str]) -> Callable[[Any], str]:
    def told(message: Any) -> str:
        shown = type(message)()
        shown.CopyFrom(message)
        for name in secret:
            shown.ClearField(name)
        return tell(shown) + f"({', '.join(secret)} redacted)"

    return told
