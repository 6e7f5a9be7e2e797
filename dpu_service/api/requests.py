"""Bodies of requests, and how they are read. Fields that are not listed are ignored."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from dpu_service.api.errors import ApiError


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """What both completion endpoints take; null counts as absent. From `bad_words` on: not built yet."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None

    bad_words: Any = None
    prompt_logprobs: Any = None
    return_tokens_as_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None


class CompletionRequest(CommonRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    prompt_embeds: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only those of type `text` are served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(CommonRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    echo: Any = None


_Body = TypeVar("_Body", bound=CommonRequest)
_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


def read_request(body: bytes, kind: type[_Body]) -> _Body:
    """Parses and type-checks a body.

    Raises:
        ApiError: 400, naming the field where one is at fault.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from error


def _wrong_type(message: str) -> ApiError:
    """From msgspec's message, which ends in the path of the value: "Expected `int`, got `str` - at `$.n`"."""
    path = _PATH.search(message)
    missing = _MISSING.search(message)
    inner = path.group(1).lstrip(".") if path else ""
    param = ".".join(filter(None, [inner, missing.group(1) if missing else ""])) or None
    reason = _PATH.sub("", message)
    text = f"'{param}': {reason}" if param else f"the body is not as expected: {reason}"
    return ApiError(400, text, param=param, code="missing_required_parameter" if missing else "invalid_type")
