"""Keys and limits of tenants, in OpenAI's words."""

from __future__ import annotations

import math

from dpu_service import metrics
from dpu_service.api.errors import ApiError
from dpu_service.api.exchange import Exchange
from dpu_service.service import Service
from dpu_service.tenants.account import Account, OverLimitError, Rate, Ticket, TooLargeForLimitError
from dpu_service.tenants.gate import KeyMissingError, KeyUnknownError

PUBLIC = ("/health", "/ready")
"""Paths that need no key. Everything else does, also what does not exist."""
METRICS = "/metrics"


def account_of(service: Service, exchange: Exchange) -> Account | None:
    """Whose request this is; None where nobody asks.

    Raises:
        ApiError: 401 without a good key, 403 for metrics with a key that does not open them.
    """
    if exchange.path in PUBLIC or (exchange.path == METRICS and service.config.open_metrics):
        return None
    try:
        account = service.gate.account(exchange.headers.get(b"authorization"))
    except KeyMissingError:
        raise _unauthorized("no API key was given; send it as 'Authorization: Bearer …'", b"Bearer") from None
    except KeyUnknownError:
        raise _unauthorized("this API key is not known here", b'Bearer error="invalid_token"') from None
    if account.tenant.name:
        exchange.notes["tenant"] = account.tenant.name
    if exchange.path == METRICS and not account.tenant.metrics:
        raise ApiError(403, "this API key does not open the metrics", code="insufficient_permissions")
    return account


def check_account(exchange: Exchange) -> None:
    """Whether any request may begin: before much is done for it.

    Raises:
        ApiError: 429.
    """
    account = _account(exchange)
    try:
        account.check()
    except OverLimitError as error:
        raise _over(exchange, account, error) from None


def enter(exchange: Exchange, sequences: int, prompt_tokens: int, most_tokens: int) -> Ticket:
    """Lets a request begin, and tells what is left.

    Raises:
        ApiError: 429, or 400 for a request that would never be let in.
    """
    account = _account(exchange)
    try:
        ticket = account.enter(sequences, prompt_tokens, most_tokens)
    except OverLimitError as error:
        raise _over(exchange, account, error) from None
    except TooLargeForLimitError as error:
        raise ApiError(400, str(error), param="n", code="rate_limit_exceeded") from None
    exchange.extra.update(_headers(account.rates()))
    return ticket


def _account(exchange: Exchange) -> Account:
    assert exchange.account is not None, "only public paths are without"
    return exchange.account


def _over(exchange: Exchange, account: Account, error: OverLimitError) -> ApiError:
    metrics.TENANT_REFUSALS.labels(account.tenant.name, error.what).inc()
    exchange.extra.update(_headers(account.rates()))
    retry = max(1, math.ceil(error.seconds))
    message = f"rate limit reached: {error}; try again in {retry} s"
    return ApiError(429, message, kind=error.what, code="rate_limit_exceeded", retry_after=retry)


def _unauthorized(message: str, challenge: bytes) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", challenge=challenge)


def _headers(rates: list[Rate]) -> dict[bytes, bytes]:
    made = {}
    for rate in rates:
        what = rate.what.encode()
        made[b"x-ratelimit-limit-" + what] = b"%d" % rate.limit
        made[b"x-ratelimit-remaining-" + what] = b"%d" % rate.left
        made[b"x-ratelimit-reset-" + what] = duration(rate.reset).encode()
    return made


def duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{rest:g}s"
