"""How a presented key meets those that are known: by digests, in constant time, never character by character."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from dpu_service.tenants import gate as module
from dpu_service.tenants.gate import Gate, KeyUnknownError
from dpu_service.tenants.page import CounterPage, create
from dpu_service.tenants.tenant import Limits, Tenant

KEY = b"blink-test-key"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    seen: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(one: Any, other: Any) -> bool:
        seen.append((one, other))
        return real(one, other)

    monkeypatch.setattr(module.hmac, "compare_digest", compare)  # type: ignore[attr-defined]
    return seen


def test_only_digests_are_compared(compared: list[tuple[bytes, bytes]]) -> None:
    digest = hashlib.sha256(KEY).digest()
    gate = Gate(CounterPage(create(1), 1), 0)
    gate.set_tenants([Tenant(name="t", slot=1, digests=[digest], limits=Limits())])
    assert gate.account(b"Bearer " + KEY).tenant.name == "t"
    assert compared == [(digest, digest)]
    for wrong in (KEY[:-1], KEY + b"x", b"x" + KEY[1:], KEY.upper(), digest, digest.hex().encode()):
        with pytest.raises(KeyUnknownError):
            gate.account(b"Bearer " + wrong)
    assert all(KEY not in pair for pair in compared)
