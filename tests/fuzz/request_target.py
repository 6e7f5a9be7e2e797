"""Any bytes as a body of /v1/completions or /v1/chat/completions: nothing but ApiError may come out, and what is taken
must be fit for the device and for the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import math
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from blink_proto import arena
from dpu_service.api.errors import ApiError, model_not_found
from dpu_service.api.prepare import Find, Prepared, prepare_chat, prepare_completion
from dpu_service.channel.geometry import Geometry
from dpu_service.channel.rings import submit_payload
from dpu_service.config import ModelInfo
from dpu_service.runtimes import Serving
from dpu_service.sequences.pump import Pump, Wanted
from dpu_service.text.bundle import TextBundle
from dpu_service.text.encoder import TextEncoder
from tests import tiny_text
from tests.openapi import judge_request

MODEL, WINDOW, QUEUE_DEPTH = "tiny", 64, 24
SIZES = arena.Sizes(channels=1, submit_slots=16, cancel_slots=16, log_slots=64, heap_tokens=256)
CHAT = b"c"
"""Bodies behind this byte are for chat, all others for completions."""


def one(data: bytes) -> None:
    """One input.

    Raises:
        Exception: a fault was found.
    """
    try:
        prepared = _prepare(data)
    except ApiError as error:
        fit_for_client(error)
    else:
        _fit_for_device(prepared)
        judge_request("ChatRequest" if data[:1] == CHAT else "CompletionRequest", json.loads(data[1:]))


def refusal(data: bytes) -> str | None:
    """The code of the error, if any."""
    try:
        _prepare(data)
    except ApiError as error:
        return error.code
    return None


def _prepare(data: bytes) -> Prepared:
    prepare = prepare_chat if data[:1] == CHAT else prepare_completion
    _, prepared = _loop().run_until_complete(prepare(served(_serving()), data[1:]))
    return prepared


def fit_for_client(error: ApiError) -> None:
    """The error has OpenAI's shape and a length that does not depend on the request."""
    said = json.loads(error.body(), parse_constant=_no_constant)["error"]
    assert 400 <= error.status < 500, said
    assert 0 < len(said["message"]) < 1000, "an answer that grows with the request"


def _fit_for_device(prepared: Prepared) -> None:
    assert 0 < sum(len(wanted.samplings) for wanted in prepared.plan.wanted) <= QUEUE_DEPTH
    for wanted in prepared.plan.wanted:
        _fit_prompt(wanted)
        for sampling in wanted.samplings:
            assert len(wanted.prompt) + sampling.max_tokens <= WINDOW
            assert sampling.max_tokens >= 1
            assert 0 <= sampling.min_tokens <= sampling.max_tokens
            assert 0 <= sampling.temperature <= 2
            assert 0 < sampling.top_p <= 1
            assert 0 <= sampling.min_p <= 1
            assert 0 <= sampling.top_k < tiny_text.vocab_size()
            assert 0 < sampling.repetition_penalty <= 100
            assert all(-2 <= penalty <= 2 for penalty in (sampling.presence_penalty, sampling.frequency_penalty))
            assert len(sampling.stop_tokens) <= 8
            assert all(0 <= token < tiny_text.vocab_size() for token in sampling.stop_tokens)
            assert 0 <= sampling.logprobs <= 21
            submit_payload(0, len(wanted.prompt), sampling, len(wanted.bias), _ban_words(wanted))


def _fit_prompt(wanted: Wanted) -> None:
    assert 1 <= len(wanted.prompt) < WINDOW
    assert all(type(token) is int and 0 <= token < tiny_text.vocab_size() for token in wanted.prompt)
    tokens = [token for token, _ in wanted.bias]
    assert tokens == sorted(set(tokens))
    assert len(tokens) <= 1024
    assert all(0 <= token < tiny_text.vocab_size() for token in tokens)
    assert all(-100 <= value <= 100 or value == -math.inf for _, value in wanted.bias)
    assert all(len(ban) >= 2 and max(ban) < tiny_text.vocab_size() for ban in wanted.bans)
    assert _ban_words(wanted) <= 1024
    assert len(wanted.prompt) + 2 * len(tokens) + _ban_words(wanted) <= SIZES.heap_tokens


def _ban_words(wanted: Wanted) -> int:
    return sum(1 + len(ban) for ban in wanted.bans)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _serving() -> Serving:
    info = ModelInfo(name=MODEL, architecture="none", parameters=1, loaded_unix_seconds=1, dtype="none")
    encoder = TextEncoder(TextBundle(tiny_text.files()), WINDOW)
    return Serving(info, geometry(), encoder, cast(Pump, SimpleNamespace(queue_depth=QUEUE_DEPTH)))


def served(serving: Serving) -> Find:
    """As a worker finds its models: this is the only one."""

    def find(name: str) -> Serving:
        if name != serving.model.name:
            raise model_not_found(name)
        return serving

    return find


def geometry() -> Geometry:
    """Of a small device."""
    return Geometry(
        layout_hash=arena.LAYOUT_HASH,
        version=arena.VERSION,
        channels=SIZES.channels,
        submit_slots=SIZES.submit_slots,
        cancel_slots=SIZES.cancel_slots,
        log_slots=SIZES.log_slots,
        heap_tokens=SIZES.heap_tokens,
        inbound_bytes=arena.InboundLayout(SIZES).total_bytes,
        outbound_bytes=arena.OutboundLayout(SIZES).total_bytes,
        nonce=1,
        epoch=1,
        vocab_size=tiny_text.vocab_size(),
        max_model_tokens=WINDOW,
        max_sequence_tokens=WINDOW,
    )


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} in an answer")
