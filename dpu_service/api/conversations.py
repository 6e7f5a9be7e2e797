"""The conversation of a chat request, and its prompt."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from typing import Any

from dpu_service.api.errors import ApiError, bad_value, shortened, unsupported
from dpu_service.api.messages import check_can_be_continued, final_text, template_messages
from dpu_service.api.nesting import check_limits
from dpu_service.api.prompts import too_long
from dpu_service.api.requests import ChatRequest, Message, TokenizeRequest
from dpu_service.api.tools import ToolUse
from dpu_service.text.conversation import Conversation
from dpu_service.text.encoder import TextEncoder, TextTooLongError
from dpu_service.text.template import ChatTemplateError

MOST_VARIABLE_CHARACTERS = 16 << 10
"""Of `chat_template_kwargs`."""
MOST_REASON = 300
"""Characters of what a template says when it refuses."""
MOST_REQUIRED_COST = 4 << 20
"""Characters tokenised where `required` has to find its function, the conversation once for each: a second's work."""
READING_COST = 1 / 32
"""Of checking a byte of a body, in characters tokenised."""
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


async def read_conversation(
    messages: list[Message],
    request: ChatRequest | TokenizeRequest,
    tools: ToolUse,
    encoder: TextEncoder,
    window: int,
    body_bytes: int,
) -> Conversation:
    """Checks all that goes into the prompt, in a thread where the body is long.

    Raises:
        ApiError: 400, naming the field.
    """
    work = partial(_read, messages, request, tools, encoder, window)
    return await encoder.run(int(body_bytes * READING_COST), work)


def _read(
    messages: list[Message], request: ChatRequest | TokenizeRequest, tools: ToolUse, encoder: TextEncoder, window: int
) -> Conversation:
    if len(messages) > window:  # each one is a token at least
        raise too_long(len(messages), window, "messages")
    conversation = Conversation(
        messages=template_messages(messages),
        tools=tools.shown,
        variables=_variables(request.chat_template_kwargs or {}, encoder),
        add_generation_prompt=_generation_prompt(request),
        continue_final=bool(request.continue_final_message),
    )
    if conversation.continue_final:
        check_can_be_continued(conversation.messages)
    if (tools.opening or tools.required) and not conversation.add_generation_prompt:
        raise bad_value("tool_choice", "a call cannot be forced without a generation prompt to begin it behind")
    conversation.measure()
    if conversation.cost * len(tools.required) > MOST_REQUIRED_COST:
        raise bad_value("tool_choice", "'required' among so many tools needs a shorter conversation; name a function")
    return conversation


def echoed(request: ChatRequest, conversation: Conversation) -> str:
    """What `echo` puts in front of the answer: the text that it continues.

    Raises:
        ApiError: 400: it continues none.
    """
    if not request.echo:
        return ""
    if not conversation.continue_final:
        raise unsupported("echo", "'echo' needs 'continue_final_message' in chat")
    return final_text(conversation.messages[-1])


async def chat_prompts(
    conversation: Conversation,
    encoder: TextEncoder,
    window: int,
    openings: Items[str] = ("",),
    *,
    bounded: bool = True,
) -> list[list[int]]:
    """Token ids of a conversation that goes on with each of these texts.

    Args:
        bounded: see `TextEncoder.encode_text`.

    Raises:
        ApiError: 400: refused by the template, or too long.
    """
    try:
        prompts = await encoder.encode_openings(conversation, openings, bounded=bounded)
    except ChatTemplateError as error:
        text = shortened(str(error), MOST_REASON)  # a template may quote the request
        raise ApiError(400, text, param="messages", code="chat_template_error") from error
    except TextTooLongError as error:
        raise too_long(error.at_least, window, "messages") from error
    if not all(prompts):
        raise bad_value("messages", "the conversation gives an empty prompt")
    return prompts


def _generation_prompt(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether the prompt ends with the beginning of an answer: unless it ends with a message to continue."""
    given = request.add_generation_prompt
    if given and request.continue_final_message:
        raise bad_value("add_generation_prompt", "'add_generation_prompt' must be false with 'continue_final_message'")
    return not request.continue_final_message if given is None else given


def _variables(given: dict[str, Any], encoder: TextEncoder) -> dict[str, Any]:
    at = "chat_template_kwargs"
    for name in given:
        if name in _RESERVED or name in encoder.bundle.template_constants:
            raise bad_value(f"{at}.{name}", f"'{at}' must not have '{name}', which the server gives to the template")
    check_limits(at, given, MOST_VARIABLE_CHARACTERS)
    return given
