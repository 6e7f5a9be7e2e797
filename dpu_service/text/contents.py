"""Which kinds of content a chat template takes: plain strings, lists of parts, or both.

Found out by trying: content that comes out as it went in, and not as Python would print it, is content that the
template takes. Templates treat the roles differently, so each role is tried.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dpu_service.text.template import ChatTemplate, ChatTemplateError, Message

_PROBE = "q7Zk2"
_PRINTED = re.compile(r"""text\\*['"]\s*:\s*\\*['"]""" + _PROBE)
"""A part as Python or JSON prints it."""
_BEFORE: dict[str, list[Message]] = {
    "system": [],
    "developer": [],
    "user": [],
    "assistant": [{"role": "user", "content": "a"}],
    "tool": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            ],
        },
    ],
}
"""A conversation that a message of each role may follow."""


@dataclass(frozen=True)
class Kinds:
    """What a template takes as content of one role."""

    strings: bool
    parts: bool


class Contents:
    """Gives content to a template in a form that it takes."""

    def __init__(self, template: ChatTemplate) -> None:
        self.kinds = {role: _try(template, role) for role in _BEFORE}

    def fit(self, role: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """A list of text parts becomes a string for templates that take strings only (joined by line breaks), and a
        string a list of one part for those that take lists only."""
        kinds = self.kinds.get(role, self.kinds["user"])
        if isinstance(content, list) and not kinds.parts:
            return "\n".join([part["text"] for part in content])
        if isinstance(content, str) and kinds.parts and not kinds.strings:
            return [{"type": "text", "text": content}]
        return content


def _try(template: ChatTemplate, role: str) -> Kinds:
    as_string = _rendered(template, role, _PROBE)
    as_parts = _rendered(template, role, [{"type": "text", "text": _PROBE}])
    return Kinds(strings=_PROBE in as_string, parts=_PROBE in as_parts and not _PRINTED.search(as_parts))


def _rendered(template: ChatTemplate, role: str, content: str | list[dict[str, Any]]) -> str:
    """Empty where the template refuses it."""
    message: Message = {"role": role, "content": content, "tool_call_id": "abcdefghi", "name": "f"}
    behind: list[Message] = [] if role in ("user", "tool") else [{"role": "user", "content": "b"}]
    try:
        return template.render([*_BEFORE[role], message, *behind])
    except ChatTemplateError:
        return ""
