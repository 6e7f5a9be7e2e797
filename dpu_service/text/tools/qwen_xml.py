"""Calls as Qwen3-Coder models write them: `<tool_call><function=NAME>`, for each parameter
`<parameter=KEY>VALUE</parameter>`, then `</function></tool_call>`, with line breaks between the tags and around each
value.

A value is a string where the function's schema says so or where it is no JSON. Arguments are told parameter by
parameter, each once its closing tag has come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dpu_service.text.tools.call_object import NAME
from dpu_service.text.tools.calls_parser import CallsParser
from dpu_service.text.tools.pieces import CallPiece, Heard

_FUNCTION = re.compile(r"<function=([^<>\s]{1,128})>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,128})>")
_LONGEST_TAG = 141
_END_VALUE, _END_FUNCTION, _END_CALL = "</parameter>", "</function>", "</tool_call>"


class QwenXmlParser(CallsParser):
    """See the module.

    Args:
        schemas: for each function its parameters' JSON schema.
    """

    marker = "<tool_call>"
    closers = (_END_CALL,)

    def __init__(self, schemas: Mapping[str, Any], parallel: bool = True) -> None:
        super().__init__(parallel)
        self._schemas = schemas
        self._name = self._key = ""
        self._told_parameters = self._searched = 0

    def finish(self) -> Heard:
        """See `ToolParser`. A value that was cut is a string that was cut."""
        if self._told and self._stage == self._value and not self.over:
            self._tell_arguments(json.dumps(self._buffer.removeprefix("\n"), ensure_ascii=False)[:-1])
        return super().finish()

    def _open(self) -> bool:
        if not self._hold_space():
            return False
        match = _FUNCTION.match(self._buffer)
        if match and NAME.fullmatch(match[1]):
            self._hold(match.end())
            self._name, self._told_parameters, self._stage = match[1], 0, self._parameters
        elif match or not _may_be_tag(self._buffer, "<function="):
            self._fail()
        else:
            return False
        return True

    def _parameters(self) -> bool:
        """Between the parameters of a call."""
        if not self._hold_space():
            return False
        match = _PARAMETER.match(self._buffer)
        if match:
            self._tell_name()
            self._buffer, self._key = self._buffer[match.end() :], match[1]
            self._searched, self._stage = 0, self._value
        elif self._buffer.startswith((_END_FUNCTION, _END_CALL)):
            self._end()
        elif any(_may_be_tag(self._buffer, tag) for tag in ("<parameter=", _END_FUNCTION, _END_CALL)):
            return False
        elif self._told:
            self._told, self._stage = False, self._text
        else:
            self._fail()
        return True

    def _value(self) -> bool:
        """Within a parameter."""
        end = self._buffer.find(_END_VALUE, self._searched)
        if end < 0:
            self._searched = max(0, len(self._buffer) - len(_END_VALUE) + 1)
            return False
        self._tell_arguments(self._json(self._buffer[:end].removeprefix("\n").removesuffix("\n")))
        self._buffer, self._stage = self._buffer[end + len(_END_VALUE) :], self._parameters
        return True

    def _end(self) -> None:
        self._tell_name()
        self._heard.calls.append(CallPiece(self.calls - 1, None, "}" if self._told_parameters else "{}"))
        self._buffer = self._buffer.removeprefix(_END_FUNCTION)
        self._told, self._stage, self.over = False, self._behind, not self._parallel

    def _hold(self, size: int) -> None:
        self._held, self._buffer = self._held + self._buffer[:size], self._buffer[size:]

    def _tell_name(self) -> None:
        if not self._told:
            self._told, self._quiet, self._space = True, True, ""
            self._heard.calls.append(CallPiece(self.calls, self._name, ""))
            self.calls += 1
        self._held = ""

    def _tell_arguments(self, value: str) -> None:
        start = ", " if self._told_parameters else "{"
        text = f"{start}{json.dumps(self._key, ensure_ascii=False)}: {value}"
        self._heard.calls.append(CallPiece(self.calls - 1, None, text))
        self._told_parameters += 1

    def _json(self, value: str) -> str:
        kind = _kind(self._schemas.get(self._name), self._key)
        if kind == "boolean" and value.lower() in ("true", "false"):
            return value.lower()
        if kind != "string" and _is_json(value):
            return value
        return json.dumps(value, ensure_ascii=False)


def _kind(schema: Any, key: str) -> Any:
    """The type of a parameter, where its schema tells one."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    one = properties.get(key) if isinstance(properties, dict) else None
    return one.get("type") if isinstance(one, dict) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _may_be_tag(text: str, tag: str) -> bool:
    """Whether the text may be the beginning of such a tag."""
    if len(text) < len(tag):
        return tag.startswith(text)
    return tag.endswith("=") and text.startswith(tag) and len(text) <= _LONGEST_TAG and ">" not in text
