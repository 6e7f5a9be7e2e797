"""From a body to a plan: every check that can be made before the device hears of the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dpu_service.api.answers import ChatShape, CompletionShape, Render, Shape
from dpu_service.api.errors import bad_value, model_not_found
from dpu_service.api.generation import Plan
from dpu_service.api.logprobs import Entry, asked_of_chat, asked_of_completion, chat_object, completion_object
from dpu_service.api.prompts import chat_prompt, completion_prompts
from dpu_service.api.requests import ChatRequest, CommonRequest, CompletionRequest, read_request
from dpu_service.api.sampling import Choices, fit_window, read_choices, read_stops
from dpu_service.api.unbuilt import refuse_unbuilt
from dpu_service.sequences.pump import Wanted
from dpu_service.service import Serving
from dpu_service.text.spelling import Spelling

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `max_tokens` of plain completions; chat takes what the window leaves."""


@dataclass(frozen=True)
class Prepared:
    """A request that may go to the device."""

    plan: Plan
    shape: Shape
    stream: bool
    with_usage: bool


async def prepare_completion(serving: Serving, body: bytes) -> Prepared:
    """Checks a body of /v1/completions.

    Raises:
        ApiError: what is wrong with it.
    """
    request = read_request(body, CompletionRequest)
    with_usage = _check_common(serving, request)
    geometry = serving.geometry
    choices = read_choices(request, geometry.vocab_size, asked_of_completion(request, geometry))
    stops = read_stops(request)
    most = serving.pump.queue_depth // choices.count
    window = geometry.window
    prompts = await completion_prompts(request.prompt, serving.encoder, geometry.vocab_size, most, window)
    wanted = []
    for prompt in prompts:
        length = _length(serving, prompt, choices, request.max_tokens, "max_tokens", "prompt")
        if request.max_tokens is None:
            length = min(length, DEFAULT_COMPLETION_TOKENS)
        wanted.append(Wanted(prompt, choices.samplings(length), choices.bias.entries))
    shape = CompletionShape(serving.model.name, with_usage, _render(serving, choices, completion_object))
    return Prepared(_plan(request, wanted, stops, choices), shape, bool(request.stream), with_usage)


async def prepare_chat(serving: Serving, body: bytes) -> Prepared:
    """Checks a body of /v1/chat/completions.

    Raises:
        ApiError: what is wrong with it.
    """
    request = read_request(body, ChatRequest)
    with_usage = _check_common(serving, request)
    geometry = serving.geometry
    choices = read_choices(request, geometry.vocab_size, asked_of_chat(request, geometry))
    stops = read_stops(request)
    prompt = await chat_prompt(request.messages, serving.encoder, geometry.window)
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    length = _length(serving, prompt, choices, getattr(request, param), param, "messages")
    wanted = [Wanted(prompt, choices.samplings(length), choices.bias.entries)]
    shape = ChatShape(serving.model.name, with_usage, _render(serving, choices, chat_object))
    return Prepared(_plan(request, wanted, stops, choices), shape, bool(request.stream), with_usage)


def _check_common(serving: Serving, request: CommonRequest) -> bool:
    """Model, unbuilt fields and stream options; whether usage goes into the stream."""
    if request.model != serving.model.name:
        raise model_not_found(request.model)
    refuse_unbuilt(request)
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "'stream_options' goes with 'stream': true only")
    return bool(request.stream_options is not None and request.stream_options.include_usage)


def _length(
    serving: Serving, prompt: list[int], choices: Choices, wanted: int | None, param: str, prompt_param: str
) -> int:
    heap = serving.geometry.heap_tokens - 2 * len(choices.bias.entries)  # prompt and bias stand in it together
    window = min(serving.geometry.window, heap + 1)
    return fit_window(len(prompt), wanted, window, param, prompt_param)


def _plan(request: CommonRequest, wanted: list[Wanted], stops: list[str], choices: Choices) -> Plan:
    skip_special = request.skip_special_tokens is not False
    return Plan(wanted, stops, skip_special, choices.min_tokens, choices.logprobs > 0)


def _render(
    serving: Serving, choices: Choices, make: Callable[[Spelling, list[Entry]], dict[str, Any]]
) -> Render | None:
    return partial(make, serving.encoder.bundle.spelling) if choices.logprobs else None
