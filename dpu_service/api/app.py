"""The routes, and the ASGI application over them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from dpu_service import metrics
from dpu_service.api import operations, tokens
from dpu_service.api.access import account_of
from dpu_service.api.completions import chat, completions
from dpu_service.api.errors import ApiError, internal
from dpu_service.api.exchange import Exchange, Message, Receive, Send
from dpu_service.service import Service

log = logging.getLogger(__name__)
access = logging.getLogger("dpu_service.access")

Handler = Callable[[Service, Exchange], Awaitable[None]]

ROUTES: dict[str, tuple[str, Handler]] = {
    "/v1/completions": ("POST", completions),
    "/v1/chat/completions": ("POST", chat),
    "/tokenize": ("POST", tokens.tokenize),
    "/detokenize": ("POST", tokens.detokenize),
    "/v1/models": ("GET", operations.models),
    "/health": ("GET", operations.health),
    "/ready": ("GET", operations.ready),
    "/metrics": ("GET", operations.metrics_page),
    "/version": ("GET", operations.version),
    "/openapi.json": ("GET", operations.openapi),
}
PROBES = ("/health", "/ready", "/metrics")
"""Asked every few seconds by machines; in the access log at debug level only, unless they fail."""
ONE_MODEL = "/v1/models/"


def find_route(method: str, path: str) -> tuple[str, Handler]:
    """The route's name (for metrics: bounded in number) and its handler.

    Raises:
        ApiError: 404 or 405.
    """
    if path.startswith(ONE_MODEL) and len(path) > len(ONE_MODEL):
        name, wanted = ONE_MODEL + "{model}", "GET"
        handler: Handler = partial(operations.one_model, name=path[len(ONE_MODEL) :])
    elif path in ROUTES:
        name, (wanted, handler) = path, ROUTES[path]
    else:
        raise ApiError(404, "there is nothing at this path", code="unknown_url")
    if method != wanted and not (method == "HEAD" and wanted == "GET"):
        allow = "GET, HEAD" if wanted == "GET" else wanted
        raise ApiError(405, f"this path takes {wanted} only", code="method_not_allowed", allow=allow)
    return name, handler


class App:
    """An ASGI 3 application for HTTP."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request; nothing a handler does gets out as an exception."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._service.bodies)
        route = "unknown"
        try:
            exchange.close_after = self._service.draining
            exchange.account = account_of(self._service, exchange)
            route, handler = find_route(exchange.method, exchange.path)
            await handler(self._service, exchange)
        except ApiError as error:
            if exchange.started:
                log.error("refused a request after its answer had begun", extra={"fields": {"code": error.code}})
            else:
                await exchange.refuse(error)
        except Exception:
            log.exception("a request failed")
            if not exchange.started:
                await exchange.refuse(internal())
        finally:
            exchange.close()
            self._note(exchange, route)

    def _note(self, exchange: Exchange, route: str) -> None:
        metrics.HTTP_REQUESTS.labels(route, str(exchange.status)).inc()
        if not self._service.config.access_log:
            return
        fields = {
            "method": exchange.method,
            "route": route,
            "status": exchange.status,
            "seconds": round(time.monotonic() - exchange.arrived, 6),
            "request_id": exchange.request_id,
            "client": exchange.client,
            **exchange.notes,
        }
        level = logging.DEBUG if route in PROBES and exchange.status < 400 else logging.INFO
        access.log(level, "request", extra={"fields": fields})
