"""POST /tokenize and POST /detokenize, in vLLM's shape."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from dpu_service.api.conversations import chat_prompts, read_conversation
from dpu_service.api.errors import bad_value, context_length, model_not_found, unavailable
from dpu_service.api.exchange import Exchange
from dpu_service.api.prompts import PromptRules, read_text, read_tokens
from dpu_service.api.requests import DetokenizeRequest, TokenizeRequest, read_request
from dpu_service.api.tools import read_tools
from dpu_service.api.unbuilt import refuse_unbuilt
from dpu_service.runtimes import Serving
from dpu_service.service import Service

DECODE_COST = 8
"""Decoding a token, in characters tokenised."""


async def tokenize(service: Service, exchange: Exchange) -> None:
    """Answers POST /tokenize: the tokens that a completion or a chat would have as its prompt.

    Texts are limited as those of prompts; their tokens may be more than the context window.

    Raises:
        ApiError: what is wrong with the request.
    """
    _check_any(service)
    body = await _body(service, exchange)
    request = read_request(body, TokenizeRequest)
    serving = _serving(service, request.model)
    refuse_unbuilt(request)
    tokens = await _tokens(serving, request, len(body))
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": serving.geometry.window,
        "tokens": tokens,
        "token_strs": await _names(serving, tokens) if request.return_token_strs else None,
    }
    await exchange.reply(200, msgspec.json.encode(answer))


async def detokenize(service: Service, exchange: Exchange) -> None:
    """Answers POST /detokenize: the text of tokens, control tokens included. As many as the context window at most.

    Raises:
        ApiError: what is wrong with the request.
    """
    _check_any(service)
    request = read_request(await _body(service, exchange), DetokenizeRequest)
    serving = _serving(service, request.model)
    window = serving.geometry.window
    if len(request.tokens) > window:
        raise context_length(f"{len(request.tokens)} tokens are over the context window of {window}", "tokens")
    tokens = read_tokens(request.tokens, _rules(serving), "tokens")
    work = partial(_decode, serving, tokens)
    text = await serving.encoder.run(DECODE_COST * len(tokens), work)
    await exchange.reply(200, msgspec.json.encode({"prompt": text}))


def _check_any(service: Service) -> None:
    if not service.runtimes.servings:
        raise unavailable(f"not ready: {service.why_not_ready()}", "not_ready")


def _serving(service: Service, model: str | None) -> Serving:
    """Of the model, or the first one there is; its device need not be ready."""
    _check_any(service)
    found = [one for one in service.runtimes.servings if model is None or one.model.name == model]
    if not found:
        raise model_not_found(model or "")
    return found[0] if model is None else max(found, key=lambda one: one.geometry.window)


async def _body(service: Service, exchange: Exchange) -> bytes:
    return await exchange.body(service.config.max_body_bytes, service.config.body_timeout)


def _rules(serving: Serving, add_special: bool = True) -> PromptRules:
    geometry = serving.geometry
    return PromptRules(geometry.vocab_size, 1, geometry.window, add_special=add_special, bounded=False)


async def _tokens(serving: Serving, request: TokenizeRequest, body_bytes: int) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise bad_value("prompt", "either 'prompt' or 'messages' must be given")
    if request.prompt is not None:
        if request.tools:
            raise bad_value("tools", "'tools' goes with 'messages' only")
        rules = _rules(serving, request.add_special_tokens is not False)
        return (await read_text(request.prompt, serving.encoder, rules)).tokens
    if request.add_special_tokens:
        raise bad_value("add_special_tokens", "the chat template writes the special tokens of 'messages'")
    assert request.messages is not None
    encoder, window = serving.encoder, serving.geometry.window
    tools = read_tools(request.tools, None, None, encoder)
    conversation = await read_conversation(request.messages, request, tools, encoder, window, body_bytes)
    (prompt,) = await chat_prompts(conversation, encoder, window, bounded=False)
    return prompt


async def _names(serving: Serving, tokens: list[int]) -> list[str | None]:
    name = serving.encoder.bundle.tokenizer.id_to_token
    return await serving.encoder.run(len(tokens), lambda: [name(token) for token in tokens])


def _decode(serving: Serving, tokens: list[int]) -> str:
    detokenizer = serving.encoder.bundle.detokenizer(skip_special=False)
    return detokenizer.feed(tokens) + detokenizer.flush()
