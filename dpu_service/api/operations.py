"""Probes, metrics, version, the OpenAPI document and the list of models."""

from __future__ import annotations

from typing import Any

import msgspec

from blink_proto import VERSION
from dpu_service import metrics
from dpu_service.api.errors import model_not_found
from dpu_service.api.exchange import Exchange
from dpu_service.api.openapi import document
from dpu_service.runtimes import Serving
from dpu_service.service import Service


async def health(service: Service, exchange: Exchange) -> None:
    """GET /health: this process lives and its loop turns."""
    await exchange.reply(200, b'{"status":"ok"}')


async def ready(service: Service, exchange: Exchange) -> None:
    """GET /ready: 200 while completions are taken, else 503 and why."""
    if service.announced:
        unready = {"unready": unready} if (unready := service.runtimes.why_not_ready()) else {}
        await exchange.reply(200, msgspec.json.encode({"status": "ready", **unready}))
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
    service.show_sequences()
    page = metrics.Page([_device(service.runtimes.at(number)) for number in range(len(service.runtimes))])
    await exchange.reply(200, metrics.render(page), metrics.CONTENT_TYPE)


def _device(serving: Serving | None) -> metrics.Device:
    if serving is None:
        return metrics.Device(None, False, True, 0.0)
    pump = serving.pump
    return metrics.Device(serving.telemetry(), pump.ready, pump.health.is_lost, pump.seconds_silent)


async def models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models."""
    data = [_model(one) for one in _models(service).values()]
    await exchange.reply(200, msgspec.json.encode({"object": "list", "data": data}))


async def one_model(service: Service, exchange: Exchange, name: str) -> None:
    """GET /v1/models/{name}.

    Raises:
        ApiError: 404.
    """
    serving = _models(service).get(name)
    if serving is None:
        raise model_not_found(name)
    await exchange.reply(200, msgspec.json.encode(_model(serving)))


def _models(service: Service) -> dict[str, Serving]:
    """By name; of several runtimes with one model, that with the largest window."""
    found: dict[str, Serving] = {}
    for one in service.runtimes.servings:
        known = found.get(one.model.name)
        if known is None or one.geometry.window > known.geometry.window:
            found[one.model.name] = one
    return found


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
