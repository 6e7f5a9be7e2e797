"""A tenant, as the supervisor tells the workers about it."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of all workers together; None: no limit."""

    concurrent_sequences: int | None = None
    """Sequences of requests that are being answered."""
    queued_sequences: int | None = None
    """Of these, sequences without a first token."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """`slot` is its place in the counter page, the same for as long as the supervisor lives."""

    name: str
    slot: int
    digests: list[bytes]
    limits: Limits
    metrics: bool = False
    """Whether it may read /metrics, which tell about all tenants."""

    def __repr__(self) -> str:
        return f"Tenant({self.name!r}, slot={self.slot})"
