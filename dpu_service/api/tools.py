"""Tools of a chat request: what the template hears of them, and who finds calls in the answer."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dpu_service.api.errors import ApiError, bad_value, unsupported
from dpu_service.api.tool_schemas import check_tools
from dpu_service.text.encoder import TextEncoder
from dpu_service.text.tools.formats import ToolFormat
from dpu_service.text.tools.named import NamedParser
from dpu_service.text.tools.pieces import ToolParser

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolUse:
    """How a request uses tools; as it stands, not at all.

    Attributes:
        shown: for the template.
        opening: what the answer is made to begin with.
        required: where it must call one of several functions: what it begins with, for each of them.
        parser: a fresh one for each choice; None where calls are not looked for.
        markers: control tokens that the parser has to see.
        call_id: a fresh id.
    """

    shown: list[dict[str, Any]] | None = None
    opening: str = ""
    required: Mapping[str, str] = field(default_factory=dict)
    parser: Callable[[], ToolParser] | None = None
    markers: frozenset[int] = frozenset()
    call_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


def read_tools(
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    parallel: bool | None,
    encoder: TextEncoder,
) -> ToolUse:
    """Checks `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: 400, naming the field: malformed tools, a choice among none, or what this model cannot do.
    """
    schemas = check_tools(tools or [])
    forced = _forced(choice, schemas)
    if not schemas or choice == "none":
        return ToolUse()
    if not encoder.chat.takes_tools:
        raise unsupported("tools", "the chat template of this model has no place for tools")
    tool_format = encoder.tool_format
    if tool_format is None:
        raise unsupported("tools", "it is not known how this model writes tool calls; see --tool-parser")
    ids = encoder.bundle.control_tokens
    use = ToolUse(
        shown=tools,
        parser=partial(tool_format.parser, schemas, parallel is not False),
        markers=frozenset(ids[marker] for marker in tool_format.markers if marker in ids),
        call_id=_ids(tool_format),
    )
    return _with_choice(use, tool_format, forced) if forced else use


def named(use: ToolUse, name: str) -> ToolUse:
    """The same with this one of the required functions."""
    return replace(use, opening=use.required[name], required={}, parser=partial(NamedParser, name), markers=frozenset())


def _forced(choice: str | dict[str, Any] | None, schemas: dict[str, Any]) -> list[str]:
    """The functions of which the answer has to call one; none where it need not call any."""
    if choice in (None, "none", "auto"):
        return []
    if not schemas:
        raise bad_value("tool_choice", "'tool_choice' needs 'tools'")
    return list(schemas) if choice == "required" else [_named(choice, schemas)]


def _named(choice: Any, schemas: dict[str, Any]) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported("tool_choice.type", "only a 'tool_choice' of type 'function' is supported")
    if kind is None or not isinstance(name, str):
        raise bad_value(
            "tool_choice",
            '\'tool_choice\' must be "none", "auto", "required", or {"type": "function", "function": {"name": …}}',
        )
    if name not in schemas:
        raise bad_value("tool_choice.function.name", "'tool_choice' names a function that 'tools' does not have")
    return name


def _with_choice(use: ToolUse, tool_format: ToolFormat, names: list[str]) -> ToolUse:
    """The prompt goes on with the beginning of the call, so that the model has nothing to add but its arguments."""
    if tool_format.opening is None:
        raise _cannot_force(tool_format)
    use = replace(use, required={name: tool_format.opening(name) for name in names})
    return named(use, names[0]) if len(names) == 1 else use


def _cannot_force(tool_format: ToolFormat) -> ApiError:
    return unsupported("tool_choice", f"a call cannot be forced in the format of this model ({tool_format.name})")


def _ids(tool_format: ToolFormat) -> Callable[[], str]:
    size = tool_format.id_characters
    if not size:
        return ToolUse.call_id
    return lambda: "".join(secrets.choice(_LETTERS) for _ in range(size))
