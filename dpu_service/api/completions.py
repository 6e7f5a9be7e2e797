"""POST /v1/completions and POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from dpu_service import metrics
from dpu_service.api.answers import DONE, Piece, usage
from dpu_service.api.errors import ApiError, from_sequences, internal, unavailable
from dpu_service.api.exchange import EVENT_STREAM, Exchange
from dpu_service.api.generation import Generation
from dpu_service.api.outflow import Outflow
from dpu_service.api.prepare import Prepared, prepare_chat, prepare_completion
from dpu_service.api.ranking import best
from dpu_service.sequences.errors import ClientGoneError, SequencesError
from dpu_service.sequences.inbox import Inbox
from dpu_service.service import Service, Serving

log = logging.getLogger(__name__)

STREAM_HEADERS = {b"cache-control": b"no-cache", b"x-accel-buffering": b"no"}
"""The second one tells nginx and its kin not to collect the stream."""

INLINE_LOGPROBS = 1000
"""Tokens with log-probabilities of an answer that is written within the event loop; each takes up to 30 µs."""

Prepare = Callable[[Serving, bytes], Awaitable[Prepared]]


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
    serving = _serving(service, exchange)
    body = await exchange.body(service.config.max_body_bytes, service.config.body_timeout)
    prepared = await prepare(serving, body)
    _serving(service, exchange)
    inbox = Inbox()
    exchange.when_gone(lambda: inbox.fail(ClientGoneError("the client went away")))
    try:
        generation = Generation(serving, prepared.plan, inbox, exchange.arrived)
    except SequencesError as error:
        raise from_sequences(error) from error
    exchange.notes.update(prompt_tokens=prepared.plan.prompt_tokens, stream=prepared.stream)
    try:
        run = _stream if prepared.stream else _whole
        return await run(exchange, generation, prepared)
    except ClientGoneError:
        return "client_gone"
    except SequencesError as error:
        raise from_sequences(error) from error
    finally:
        generation.close()
        exchange.notes["completion_tokens"] = generation.completion_tokens


def _serving(service: Service, exchange: Exchange) -> Serving:
    if service.draining:
        exchange.close_after = True
    if not service.ready or service.serving is None:
        raise unavailable(f"not ready: {service.why_not_ready()}", "shutting_down" if service.draining else "not_ready")
    return service.serving


def _used(prepared: Prepared, generation: Generation) -> dict[str, int]:
    return usage(prepared.plan.prompt_tokens, generation.completion_tokens)


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
