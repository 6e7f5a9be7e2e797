"""From a body to a plan: every check that can be made before the device hears of the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from dpu_service.api.answers import ChatShape, CompletionShape, Shape
from dpu_service.api.bad_words import read_bad_words
from dpu_service.api.bias import read_bias
from dpu_service.api.conversations import chat_prompts, echoed, read_conversation
from dpu_service.api.deciding import fork
from dpu_service.api.echo import Echo, echo_of
from dpu_service.api.errors import bad_value, unsupported
from dpu_service.api.generation import Plan
from dpu_service.api.logprobs import (
    Asked,
    Naming,
    asked_of_chat,
    asked_of_completion,
    chat_object,
    completion_object,
    prompt_object,
)
from dpu_service.api.prompts import Prompt, PromptRules, completion_prompts, last_tokens
from dpu_service.api.requests import ChatRequest, CommonRequest, CompletionRequest, read_request
from dpu_service.api.salt import cache_salt
from dpu_service.api.sampling import Choices, fit_window, read_choices, read_counts, read_text_rules
from dpu_service.api.tools import named, read_tools
from dpu_service.api.unbuilt import refuse_unbuilt
from dpu_service.runtimes import Serving
from dpu_service.sequences.pump import Wanted
from dpu_service.text.choice import TextRules

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `max_tokens` of plain completions; chat takes what the window leaves."""
ECHO_COST = 8
"""Decoding a token for an echo, in characters tokenised."""


@dataclass(frozen=True)
class Prepared:
    """A request that may go to the device.

    Attributes:
        plans: one, or one for each function of which the answer has to call one (see `deciding`).
    """

    plans: list[Plan]
    shape: Shape
    stream: bool
    with_usage: bool

    @property
    def plan(self) -> Plan:
        """The one that is left, or the largest one."""
        return max(self.plans, key=lambda plan: plan.prompt_tokens)


Find = Callable[[str], Serving]
"""By the name of a model: what serves it. Raises ApiError where nothing does."""
Prepare = Callable[[Find, bytes, str], Awaitable[tuple[Serving, Prepared]]]
"""Checks a body of a tenant; also gives what it was checked by. Raises ApiError for what is wrong with it."""


async def prepare_completion(find: Find, body: bytes, tenant: str = "") -> tuple[Serving, Prepared]:
    """For /v1/completions; see `Prepare`."""
    request = read_request(body, CompletionRequest)
    serving = find(request.model)
    with_usage = _check_common(request)
    counts = read_counts(request.n, request.best_of, request.stream, serving.pump.queue_depth)
    asked = asked_of_completion(request, serving.geometry, ranked=counts.made > counts.answered)
    choices = await _choices(serving, request, counts.made, asked, cache_salt(tenant, request.cache_salt))
    rules = read_text_rules(request)
    prompts = await completion_prompts(bytes(request.prompt), serving.encoder, _prompt_rules(serving, request, choices))
    plan = Plan(
        wanted=[_wanted(serving, request, choices, prompt) for prompt in prompts],
        rules=rules,
        asked=asked,
        continues=True,
        echoes=await _echoes(serving, prompts, rules) if request.echo else [],
        only_prompt=request.max_tokens == 0,
        kept=counts.answered if counts.made > counts.answered else 0,
    )
    naming = _naming(serving, request)
    render = partial(completion_object, naming) if asked.shown else None
    shape = CompletionShape(serving.model.name, with_usage, render, partial(prompt_object, naming))
    return serving, Prepared([plan], shape, bool(request.stream), with_usage)


async def prepare_chat(find: Find, body: bytes, tenant: str = "") -> tuple[Serving, Prepared]:
    """For /v1/chat/completions; see `Prepare`."""
    request = read_request(body, ChatRequest)
    serving = find(request.model)
    with_usage = _check_common(request)
    counts = read_counts(request.n, None, request.stream, serving.pump.queue_depth)
    asked = asked_of_chat(request, serving.geometry)
    choices = await _choices(serving, request, counts.made, asked, cache_salt(tenant, request.cache_salt))
    encoder, window = serving.encoder, serving.geometry.window
    tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls, encoder)
    if tools.required and counts.made > 1:
        raise unsupported("n", "'n' must be 1 with a 'tool_choice' of 'required' among several tools")
    rules = read_text_rules(request)
    conversation = await read_conversation(request.messages, request, tools, encoder, window, len(body))
    echo = echoed(request, conversation)
    uses = [named(tools, name) for name in tools.required] or [tools]
    openings, bounded = [use.opening for use in uses], request.truncate_prompt_tokens is None
    prompts = await chat_prompts(conversation, encoder, window, openings, bounded=bounded)
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit: int | None = getattr(request, param)
    prompts = _last_tokens(prompts, _keep(request, _window(serving, choices) - max(1, limit or 1)))
    longest = max(map(len, prompts))
    length = fit_window(longest, limit, _window(serving, choices), param, "messages")
    plans = [
        Plan(
            wanted=[choices.wanted(prompt, length)],
            rules=replace(rules, markers=use.markers),
            asked=asked,
            continues=conversation.continue_final or bool(use.opening),
            parser=use.parser,
        )
        for use, prompt in zip(uses, prompts, strict=True)
    ]
    naming = _naming(serving, request)
    render = partial(chat_object, naming) if asked.shown else None
    shape = ChatShape(serving.model.name, with_usage, render, partial(prompt_object, naming), tools.call_id, echo)
    return serving, Prepared(plans, shape, bool(request.stream), with_usage)


def _last_tokens(prompts: list[list[int]], keep: int | None) -> list[list[int]]:
    """Cuts all at the same place, so that they still begin alike.

    Raises:
        ApiError: 400: nothing is left that they begin with.
    """
    longest = max(prompts, key=len)
    cut = len(longest) - len(last_tokens(longest, keep))
    if len(prompts) > 1 and cut >= fork(prompts):
        raise bad_value("truncate_prompt_tokens", "'truncate_prompt_tokens' leaves nothing in front of a required call")
    return [prompt[cut:] for prompt in prompts]


def _check_common(request: CommonRequest) -> bool:
    """Unbuilt fields and stream options; whether usage goes into the stream."""
    refuse_unbuilt(request)
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "'stream_options' goes with 'stream': true only")
    return bool(request.stream_options is not None and request.stream_options.include_usage)


async def _choices(serving: Serving, request: CommonRequest, count: int, asked: Asked, salt: int) -> Choices:
    vocab_size = serving.geometry.vocab_size
    banned = await read_bad_words(request.bad_words or [], serving.encoder, vocab_size)
    bias = read_bias(request.logit_bias, request.allowed_token_ids, vocab_size, banned)
    return read_choices(request, count, bias, vocab_size, asked, salt)


def _window(serving: Serving, choices: Choices) -> int:
    heap = serving.geometry.heap_tokens - choices.bias.heap_words  # prompt and bias stand in it together
    return min(serving.geometry.window, heap + 1)


def _prompt_rules(serving: Serving, request: CompletionRequest, choices: Choices) -> PromptRules:
    answer = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return PromptRules(
        vocab_size=serving.geometry.vocab_size,
        most=serving.pump.queue_depth // choices.count,
        window=serving.geometry.window,
        keep=_keep(request, _window(serving, choices) - max(1, answer)),
        add_special=request.add_special_tokens is not False,
        bounded=request.truncate_prompt_tokens is None,
    )


def _keep(request: CommonRequest, room: int) -> int | None:
    """How many last tokens of a prompt count.

    Args:
        room: tokens that the window leaves beside the answer.
    """
    keep = request.truncate_prompt_tokens
    if keep == 0:
        raise bad_value("truncate_prompt_tokens", "'truncate_prompt_tokens' must be at least 1, or -1")
    return max(room, 1) if keep == -1 else keep


def _wanted(serving: Serving, request: CompletionRequest, choices: Choices, prompt: Prompt) -> Wanted:
    count, window = len(prompt.tokens), _window(serving, choices)
    length = fit_window(count, request.max_tokens, window, "max_tokens", "prompt", least=0 if request.echo else 1)
    if request.max_tokens is None:
        length = min(length, DEFAULT_COMPLETION_TOKENS)
    return choices.wanted(prompt.tokens, length)


async def _echoes(serving: Serving, prompts: list[Prompt], rules: TextRules) -> list[Echo]:
    bundle, encoder = serving.encoder.bundle, serving.encoder
    echoes = []
    for prompt in prompts:
        work = partial(echo_of, bundle, prompt.tokens, prompt.text, rules.skip_special)
        echoes.append(await encoder.run(ECHO_COST * len(prompt.tokens), work))
    return echoes


def _naming(serving: Serving, request: CommonRequest) -> Naming:
    return Naming(serving.encoder.bundle.spelling, bool(request.return_tokens_as_token_ids))
