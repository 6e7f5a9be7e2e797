"""Bodies of requests, and how they are read. Fields that are not listed are ignored."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgspec

from dpu_service.api import fields
from dpu_service.api.errors import ApiError, bad_value, invalid_json


class StreamOptions(msgspec.Struct):
    """What else a stream tells."""

    include_usage: fields.IncludeUsage | None = None
    continuous_usage_stats: fields.Unbuilt = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """What both completion endpoints take; null counts as absent."""

    model: fields.Model
    max_tokens: fields.MaxTokens | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    seed: fields.Seed | None = None
    n: fields.Choices | None = None
    stop: fields.Stop | None = None
    stop_token_ids: fields.StopTokens | None = None
    ignore_eos: fields.IgnoreEos | None = None
    skip_special_tokens: fields.SkipSpecial | None = None
    stream: fields.Stream | None = None
    stream_options: StreamOptions | None = None
    user: fields.User | None = None
    priority: fields.Priority | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    repetition_penalty: fields.RepetitionPenalty | None = None
    min_p: fields.MinP | None = None
    min_tokens: fields.MinTokens | None = None
    logit_bias: fields.LogitBias | None = None
    allowed_token_ids: fields.AllowedTokens | None = None

    bad_words: fields.BadWords | None = None
    include_stop_str_in_output: fields.KeepStop | None = None
    return_tokens_as_token_ids: fields.TokensAsIds | None = None
    truncate_prompt_tokens: fields.TruncatePrompt | None = None
    cache_salt: fields.CacheSalt | None = None

    response_format: fields.Unbuilt = None
    guided_json: fields.Unbuilt = None
    guided_regex: fields.Unbuilt = None
    guided_choice: fields.Unbuilt = None
    guided_grammar: fields.Unbuilt = None
    structured_outputs: fields.Unbuilt = None
    use_beam_search: fields.Unbuilt = None
    length_penalty: fields.Unbuilt = None
    early_stopping: fields.Unbuilt = None
    logits_processors: fields.Unbuilt = None
    return_token_ids: fields.Unbuilt = None
    typical_p: fields.Unbuilt = None
    stop_regex: fields.Unbuilt = None
    regex: fields.Unbuilt = None
    ebnf: fields.Unbuilt = None
    json_schema: fields.Unbuilt = None
    grammar: fields.Unbuilt = None


class CompletionRequest(CommonRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: fields.Prompt
    logprobs: fields.TopLogprobs | None = None
    prompt_logprobs: fields.PromptLogprobs | None = None
    best_of: fields.BestOf | None = None
    echo: fields.Echo | None = None
    add_special_tokens: fields.AddSpecial | None = None
    suffix: fields.Unbuilt = None
    prompt_embeds: fields.Unbuilt = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only those of type `text` are served."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """What an assistant has called."""

    name: str
    arguments: fields.Arguments


class ToolCall(msgspec.Struct):
    """A call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: fields.Role
    content: str | list[ContentPart] | None = None
    name: fields.Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: fields.ToolCallId | None = None
    reasoning_content: fields.Reasoning | None = None
    function_call: fields.Unbuilt = None
    audio: fields.Unbuilt = None


class ChatRequest(CommonRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], fields.MESSAGES]
    max_completion_tokens: fields.MaxTokens | None = None
    logprobs: fields.Logprobs | None = None
    top_logprobs: fields.TopLogprobs | None = None
    prompt_logprobs: fields.PromptLogprobs | None = None
    tools: fields.Tools | None = None
    add_generation_prompt: fields.GenerationPrompt | None = None
    continue_final_message: fields.ContinueFinal | None = None
    chat_template_kwargs: fields.TemplateVariables | None = None
    tool_choice: fields.ToolChoice | None = None
    parallel_tool_calls: fields.ParallelCalls | None = None
    functions: fields.Unbuilt = None
    function_call: fields.Unbuilt = None
    modalities: fields.Unbuilt = None
    audio: fields.Unbuilt = None
    prediction: fields.Unbuilt = None
    web_search_options: fields.Unbuilt = None
    chat_template: fields.Unbuilt = None
    documents: fields.Unbuilt = None
    echo: fields.ChatEcho | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: fields.Model | None = None
    prompt: fields.OneText | None = None
    messages: Annotated[list[Message], fields.MESSAGES] | None = None
    add_special_tokens: fields.AddSpecial | None = None
    return_token_strs: fields.TokenStrings | None = None
    tools: fields.Tools | None = None
    add_generation_prompt: fields.GenerationPrompt | None = None
    continue_final_message: fields.ContinueFinal | None = None
    chat_template_kwargs: fields.TemplateVariables | None = None
    chat_template: fields.Unbuilt = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: fields.Model | None = None
    tokens: fields.Tokens


_Body = TypeVar("_Body", bound=msgspec.Struct)
_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_RANGE = re.compile(r"^Expected `\w+` (of length )?(<|<=|>|>=) (\S+)$")
_WORDS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}
_MISSING = re.compile(r"missing required field `(\w+)`")


def read_request(body: bytes, kind: type[_Body]) -> _Body:
    """Parses and type-checks a body.

    Raises:
        ApiError: 400, naming the field where one is at fault.
    """
    try:
        return msgspec.json.decode(body.decode(), type=kind)  # msgspec by itself does not look into fields it ignores
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_json(error) from error


def _wrong_type(message: str) -> ApiError:
    """From msgspec's message, which ends in the path of the value: "Expected `int`, got `str` - at `$.n`"."""
    path = _PATH.search(message)
    missing = _MISSING.search(message)
    inner = path.group(1).lstrip(".") if path else ""
    param = ".".join(filter(None, [inner, missing.group(1) if missing else ""])) or None
    reason = _PATH.sub("", message)
    if param and (limit := _RANGE.match(reason)):
        return bad_value(param, f"'{param}' must be {_in_words(*limit.groups())}")
    text = f"'{param}': {reason}" if param else f"the body is not as expected: {reason}"
    return ApiError(400, text, param=param, code="missing_required_parameter" if missing else "invalid_type")


def _in_words(length: str | None, relation: str, bound: str) -> str:
    return f"{'of length ' if length else ''}{_WORDS[relation]} {bound.removesuffix('.0')}"
