"""The prompts of a request as token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from dpu_service.api.errors import ApiError, bad_value, context_length, unsupported
from dpu_service.api.requests import Message
from dpu_service.text.encoder import TextEncoder, TextTooLongError
from dpu_service.text.template import ChatTemplateError

ROLES = ("system", "developer", "user", "assistant")


async def completion_prompts(
    given: Any, encoder: TextEncoder, vocab_size: int, most: int, window: int
) -> list[list[int]]:
    """Token ids of each prompt: a text, a list of texts, a list of token ids, or a list of such lists.

    Args:
        most: prompts that a request may have.

    Raises:
        ApiError: 400: another type, no prompt or an empty one, a token outside the vocabulary, or too long.
    """
    prompts = _split(given)
    if not prompts:
        raise bad_value("prompt", "'prompt' must not be empty")
    if len(prompts) > most:
        raise bad_value("prompt", f"'prompt' asks for more than {most} sequences at once")
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = await _encode(prompt, encoder, window)
            await asyncio.sleep(0)  # a long list of short texts must not hold up other requests
        else:
            ids = _checked(prompt, vocab_size, window)
        if not ids:
            raise bad_value("prompt", "'prompt' must have at least one token")
        encoded.append(ids)
    return encoded


async def chat_prompt(messages: list[Message], encoder: TextEncoder, window: int) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: 400: no messages, an unknown role, content that is not text, refused by the template, or too long.
    """
    if not messages:
        raise bad_value("messages", "'messages' must not be empty")
    if len(messages) > window:  # each one is a token at least
        raise _too_long(len(messages), window, "messages")
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    try:
        ids = await encoder.encode_chat(plain)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_error") from error
    except TextTooLongError as error:
        raise _too_long(error.at_least, window, "messages") from error
    if not ids:
        raise bad_value("messages", "the conversation gives an empty prompt")
    return ids


def _split(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise bad_value("prompt", "'prompt' must be a string, a list of strings, or token ids")
    if all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
        return given
    if any(isinstance(item, str | list) for item in given):
        raise bad_value("prompt", "'prompt' must not mix strings and token ids")
    return [given]


def _checked(prompt: list[Any], vocab_size: int, window: int) -> list[int]:
    if len(prompt) > window:
        raise _too_long(len(prompt), window, "prompt")
    if not all(type(token) is int for token in prompt):
        raise bad_value("prompt", "'prompt' must hold whole numbers where it holds token ids")
    if not all(0 <= token < vocab_size for token in prompt):
        raise bad_value("prompt", f"'prompt' holds a token id that is not between 0 and {vocab_size - 1}")
    return prompt


async def _encode(prompt: str, encoder: TextEncoder, window: int) -> list[int]:
    try:
        return await encoder.encode_text(prompt)
    except TextTooLongError as error:
        raise _too_long(error.at_least, window, "prompt") from error


def _too_long(at_least: int, window: int, param: str) -> ApiError:
    return context_length(
        f"the prompt has at least {max(at_least, window + 1)} tokens, but the context window is {window} tokens "
        f"for prompt and answer together; use a shorter prompt",
        param,
    )


def _plain_message(index: int, message: Message) -> dict[str, str]:
    at = f"messages[{index}]"
    if message.role not in ROLES:
        if message.role in ("tool", "function"):
            raise unsupported(f"{at}.role", "tool calls are not supported by this server")
        raise bad_value(f"{at}.role", f"'{at}.role' must be one of: {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise unsupported(f"{at}.{name}")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _content(at, message)}


def _content(at: str, message: Message) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise bad_value(f"{at}.content", f"'{at}.content' is missing")
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise unsupported(f"{at}.content[{i}].type", "only content parts of type 'text' are supported")
        if part.text is None:
            raise bad_value(f"{at}.content[{i}].text", f"'{at}.content[{i}].text' is missing")
        texts.append(part.text)
    return "\n".join(texts)
