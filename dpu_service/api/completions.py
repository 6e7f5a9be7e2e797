"""POST /v1/completions and POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from dpu_service import metrics
from dpu_service.api.access import check_account, enter
from dpu_service.api.answers import DONE, Piece, Usage, usage
from dpu_service.api.attempts import Attempts
from dpu_service.api.deadline import Deadline
from dpu_service.api.errors import ApiError, from_sequences, internal
from dpu_service.api.exchange import EVENT_STREAM, Exchange
from dpu_service.api.generation import Generation
from dpu_service.api.outflow import Outflow
from dpu_service.api.placing import check_ready, check_room, find
from dpu_service.api.prepare import Prepare, Prepared, prepare_chat, prepare_completion
from dpu_service.api.ranking import best
from dpu_service.runtimes import Serving
from dpu_service.sequences.errors import ClientGoneError, SequencesError
from dpu_service.service import Service

log = logging.getLogger(__name__)

STREAM_HEADERS = {b"cache-control": b"no-cache", b"x-accel-buffering": b"no"}
"""The second one tells nginx and its kin not to collect the stream."""

INLINE_LOGPROBS = 1000
"""Tokens with log-probabilities of an answer that is written within the event loop; each takes up to 30 µs."""


async def completions(service: Service, exchange: Exchange) -> None:
    """Answers POST /v1/completions."""
    await _measured(service, exchange, "completions", prepare_completion)


async def chat(service: Service, exchange: Exchange) -> None:
    """Answers POST /v1/chat/completions."""
    await _measured(service, exchange, "chat", prepare_chat)


async def _measured(service: Service, exchange: Exchange, endpoint: str, prepare: Prepare) -> None:
    service.enter()
    outcome = "error"
    try:
        outcome = await _answer(service, exchange, prepare)
    except ApiError as error:
        outcome = "refused" if error.status < 500 else error.code or "error"
        raise
    finally:
        service.leave()
        metrics.COMPLETIONS.labels(endpoint, outcome).inc()
        metrics.REQUEST_SECONDS.labels(endpoint).observe(time.monotonic() - exchange.arrived)


async def _answer(service: Service, exchange: Exchange, prepare: Prepare) -> str:
    """The outcome for the metrics. Errors before the first byte are raised."""
    deadline = Deadline(exchange)
    serving, prepared = await deadline.keep(_prepared(service, exchange, prepare))
    plan, used = prepared.plan, None
    ticket = enter(exchange, plan.choices, plan.prompt_tokens, plan.most_tokens)
    attempts = Attempts(service, exchange, serving, deadline, ticket.started)
    exchange.notes["stream"] = prepared.stream
    try:
        return await attempts.run(prepared, _stream if prepared.stream else _whole)
    except ClientGoneError:
        return "client_gone"
    except SequencesError as error:
        raise from_sequences(error) from error
    finally:
        if attempts.begun:
            used = _count(exchange, attempts.prompt_tokens, attempts.completion_tokens)
        deadline.stop()
        ticket.close(used)


def _count(exchange: Exchange, prompt_tokens: int, completion_tokens: int) -> int:
    exchange.notes.update(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    _count_for_tenant(exchange, prompt_tokens, completion_tokens)
    return prompt_tokens + completion_tokens


def _count_for_tenant(exchange: Exchange, prompt_tokens: int, completion_tokens: int) -> None:
    """The label is a name of the operator's own file of keys, so there are no more series than tenants."""
    name = _tenant(exchange)
    if name:
        metrics.TENANT_TOKENS.labels(name, "prompt").inc(prompt_tokens)
        metrics.TENANT_TOKENS.labels(name, "completion").inc(completion_tokens)


def _tenant(exchange: Exchange) -> str:
    """Name of who asks; empty where there are no keys."""
    return exchange.account.tenant.name if exchange.account is not None else ""


async def _prepared(service: Service, exchange: Exchange, prepare: Prepare) -> tuple[Serving, Prepared]:
    """What can be refused is refused before the work of tokenising."""
    check_ready(service, exchange)
    body = await exchange.body(service.config.max_body_bytes, service.config.body_timeout)
    check_account(exchange)
    check_room([one for one in service.runtimes.servings if one.pump.ready])
    serving, prepared = await prepare(partial(find, service), body, _tenant(exchange))
    exchange.forget_body()
    check_ready(service, exchange)
    return serving, prepared


def _used(prepared: Prepared, generation: Generation) -> Usage:
    return usage(prepared.plan.prompt_tokens, generation.completion_tokens, generation.cached_tokens)


async def _whole(exchange: Exchange, generation: Generation, prepared: Prepared) -> str:
    plan = prepared.plan
    choices = [Piece(index) for index in range(plan.choices)]
    while not generation.over:
        for piece in await generation.next():
            choices[piece.index].add(piece)
    if plan.kept:
        choices = best(choices, generation.mean_logprobs, plan.choices // len(plan.wanted), plan.kept)
    work = partial(prepared.shape.whole, choices, _used(prepared, generation))
    long = sum(choice.tokens_described for choice in choices) > INLINE_LOGPROBS
    await exchange.reply(200, await asyncio.to_thread(work) if long else work())
    return "ok"


async def _stream(exchange: Exchange, generation: Generation, prepared: Prepared) -> str:
    """The head goes out with the first news, so that whatever fails earlier still gets a status of its own."""
    pieces = await generation.next()
    await exchange.start(200, EVENT_STREAM, STREAM_HEADERS)
    last, outcome = b"", "error"
    try:
        last = await Outflow(exchange, generation, prepared.shape).run(pieces)
        last += prepared.shape.usage_chunk(_used(prepared, generation)) if prepared.with_usage else b""
        outcome = "ok"
    except ClientGoneError:
        return "client_gone"
    except SequencesError as error:
        last, outcome = _error_event(exchange, from_sequences(error)), "error"
    except Exception:
        log.exception("a stream failed")
        last = _error_event(exchange, internal())
    await exchange.finish(last + DONE)
    return outcome


def _error_event(exchange: Exchange, error: ApiError) -> bytes:
    exchange.notes["error"] = error.code
    return b"data: " + error.body() + b"\n\n"
