"""`prompt` of a completion, from JSON, without making objects of what is refused anyway.

A body of 8 MB can hold two million lists; decoding those takes half a second in which nothing else is answered.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dpu_service.api.errors import bad_value

_KINDS = "'prompt' must be a string, a list of strings, or token ids"
_MIXED = "'prompt' must not mix strings and token ids"


def split_prompts(raw: bytes, most: int) -> list[Any]:
    """The prompts, each a text or a list of what should be token ids.

    Args:
        raw: valid JSON, but for the characters in its strings.
        most: prompts that a request may have.

    Raises:
        ApiError: 400: another type, no prompt, or too many.
        msgspec.DecodeError: a string that is none.
    """
    if raw[:1] == b'"':
        return [msgspec.json.decode(raw, type=str)]
    if raw[:1] != b"[":
        raise bad_value("prompt", _KINDS)
    prompts = _texts(raw) if b'"' in raw else _token_lists(raw, most)
    if not prompts:
        raise bad_value("prompt", "'prompt' must not be empty")
    if len(prompts) > most:
        raise _too_many(most)
    return prompts


def _texts(raw: bytes) -> list[Any]:
    try:
        return msgspec.json.decode(raw, type=list[str])
    except msgspec.ValidationError as error:
        raise bad_value("prompt", _MIXED) from error


def _token_lists(raw: bytes, most: int) -> list[Any]:
    if raw.count(b"[") > most + 1:  # without strings every bracket begins a list
        raise _too_many(most)
    given = msgspec.json.decode(raw, type=list[Any])
    nested = [isinstance(item, list) for item in given]
    if not any(nested):
        return [given] if given else []
    if not all(nested):
        raise bad_value("prompt", _KINDS)
    return given


def _too_many(most: int) -> Exception:
    return bad_value("prompt", f"'prompt' asks for more than {most} prompts at once")
