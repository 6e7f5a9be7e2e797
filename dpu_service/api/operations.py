"""Probes, metrics, version, the OpenAPI document and the list of models."""

from __future__ import annotations

from typing import Any

import msgspec

from blink_proto import VERSION
from dpu_service import metrics
from dpu_service.api.errors import model_not_found
from dpu_service.api.exchange import Exchange
from dpu_service.api.openapi import document
from dpu_service.service import Service, Serving


async def health(service: Service, exchange: Exchange) -> None:
    """GET /health: this process lives and its loop turns."""
    await exchange.reply(200, b'{"status":"ok"}')


async def ready(service: Service, exchange: Exchange) -> None:
    """GET /ready: 200 while completions are taken, else 503 and why."""
    if service.announced:
        await exchange.reply(200, b'{"status":"ready"}')
        return
    exchange.close_after = service.draining
    body = msgspec.json.encode({"status": "not ready", "reason": service.why_not_ready()})
    await exchange.reply(503, body, extra={b"retry-after": b"1"})


async def version(service: Service, exchange: Exchange) -> None:
    """GET /version."""
    await exchange.reply(200, msgspec.json.encode({"version": VERSION}))


async def openapi(service: Service, exchange: Exchange) -> None:
    """GET /openapi.json."""
    await exchange.reply(200, document.encoded())


async def metrics_page(service: Service, exchange: Exchange) -> None:
    """GET /metrics: of all workers, and the device's telemetry."""
    serving = service.serving
    pump = serving.pump if serving is not None else None
    telemetry = pump.client.telemetry() if pump is not None else None
    silent = pump.seconds_silent if pump is not None else 0.0
    service.show_sequences()
    page = metrics.Page(telemetry, pump is not None and pump.ready, silent)
    await exchange.reply(200, metrics.render(page), metrics.CONTENT_TYPE)


async def models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models."""
    data = [_model(service.serving)] if service.serving is not None else []
    await exchange.reply(200, msgspec.json.encode({"object": "list", "data": data}))


async def one_model(service: Service, exchange: Exchange, name: str) -> None:
    """GET /v1/models/{name}.

    Raises:
        ApiError: 404.
    """
    if service.serving is None or service.serving.model.name != name:
        raise model_not_found(name)
    await exchange.reply(200, msgspec.json.encode(_model(service.serving)))


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model.name,
        "object": "model",
        "created": serving.model.loaded_unix_seconds,
        "owned_by": "blink",
        "max_model_len": serving.geometry.window,
        "architecture": serving.model.architecture,
        "parameters": serving.model.parameters,
    }
