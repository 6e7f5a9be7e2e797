"""Messages of a request: their checks, and what templates get."""

from __future__ import annotations

from typing import Any

import msgspec

from dpu_service.api.errors import bad_value, unsupported
from dpu_service.api.fields import ROLES
from dpu_service.api.nesting import check_limits
from dpu_service.api.requests import Message, ToolCall
from dpu_service.text.tools.call_object import NAME


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Checked messages as templates take them.

    Raises:
        ApiError: 400: none at all, an unknown role, or content that is not text.
    """
    if not messages:
        raise bad_value("messages", "'messages' must not be empty")
    return [_template_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def check_can_be_continued(messages: list[dict[str, Any]]) -> None:
    """What `continue_final_message` needs.

    Raises:
        ApiError: 400: the last message is not the assistant's, has calls, or has no text.
    """
    last = messages[-1]
    at = f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant":
        raise bad_value(f"{at}.role", "'continue_final_message' needs a last message of the role 'assistant'")
    if "tool_calls" in last:
        raise bad_value(f"{at}.tool_calls", "'continue_final_message' cannot continue a message with tool calls")
    if not final_text(last):
        raise bad_value(f"{at}.content", "'continue_final_message' needs a last message with text")


def final_text(message: dict[str, Any]) -> str:
    """The text that the model continues: all of it, or the last part."""
    content = message["content"]
    if isinstance(content, str):
        return content
    text: str = content[-1]["text"] if content else ""
    return text


def _template_message(at: str, message: Message) -> dict[str, Any]:
    if message.role == "function":
        raise unsupported(f"{at}.role", "the role 'function' is not supported; use 'tool' and 'tool_calls'")
    if message.role not in ROLES:
        raise bad_value(f"{at}.role", f"'{at}.role' must be one of: {', '.join(ROLES)}")
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise unsupported(f"{at}.{name}")
    made = {"role": message.role, "content": _content(at, message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (given := getattr(message, name)) is not None:
            made[name] = given
    if message.tool_calls:
        made["tool_calls"] = _calls(at, message)
    return made


def _content(at: str, message: Message) -> str | list[dict[str, Any]]:
    """Of an assistant's message without content, an empty string."""
    if message.content is None:
        if message.role != "assistant":
            raise bad_value(f"{at}.content", f"'{at}.content' is missing")
        return ""
    if isinstance(message.content, str):
        return message.content
    parts = []
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise unsupported(f"{at}.content[{i}].type", "only content parts of type 'text' are supported")
        if part.text is None:
            raise bad_value(f"{at}.content[{i}].text", f"'{at}.content[{i}].text' is missing")
        parts.append({"type": "text", "text": part.text})
    return parts


def _calls(at: str, message: Message) -> list[dict[str, Any]]:
    if message.role != "assistant":
        raise bad_value(f"{at}.tool_calls", "only messages of the role 'assistant' have tool calls")
    return [_call(f"{at}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls or [])]


def _call(at: str, call: ToolCall) -> dict[str, Any]:
    if not NAME.fullmatch(call.function.name):
        raise bad_value(f"{at}.function.name", f"'{at}.function.name' is not the name of a function")
    function = {"name": call.function.name, "arguments": _arguments(f"{at}.function.arguments", call)}
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": "function", "function": function}


def _arguments(at: str, call: ToolCall) -> dict[str, Any]:
    """As an object, which is what templates write as JSON."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_value(at, f"'{at}' must be a JSON object, as a string") from error
    check_limits(at, arguments)
    return arguments
