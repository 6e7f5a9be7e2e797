"""A worker that ends while it connects: its end of the connection is one thread's at a time."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dpu_service import runtime_end
from dpu_service.channel.errors import ChannelError
from dpu_service.runtime_end import RuntimeEnd


class Connector:
    """Connects when it is let."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.inside = False
        self.closed_inside = False

    def connect(self, answer: bytes, sizes: object, channel: int) -> object:
        self.inside = True
        self.begun.set()
        assert self.go_on.wait(20)
        self.inside = False
        return object()

    def close(self) -> None:
        self.closed_inside = self.inside
        self.closed.set()


def meeting(monkeypatch: pytest.MonkeyPatch, connector: object) -> tuple[RuntimeEnd, Any]:
    """A worker's end, which connects by the connector, and a session for it."""
    monkeypatch.setattr(runtime_end, "make_connector", lambda *choice: connector)
    monkeypatch.setattr(runtime_end, "TextEncoder", lambda *parts: None)

    async def load(files: dict[str, bytes]) -> None:
        return None

    config: Any = SimpleNamespace(transport="shm", rdma=None, tool_parser="")
    bundles: Any = SimpleNamespace(load=load)
    nothing: Any = None
    geometry = SimpleNamespace(window=1, check=lambda: None, sizes=None)
    session = SimpleNamespace(transport="shm", geometry=geometry, tokenizer_files={}, transport_blob=b"", channel=0)
    return RuntimeEnd(0, config, nothing, bundles, lambda: None, lambda reply: None), session


def test_a_connector_is_not_closed_while_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = Connector()
    end, session = meeting(monkeypatch, connector)

    async def scene() -> None:
        connecting = asyncio.create_task(end._serving(session))
        assert await asyncio.to_thread(connector.begun.wait, 20)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        connector.go_on.set()
        assert await asyncio.to_thread(connector.closed.wait, 20)

    asyncio.run(scene())
    assert not connector.closed_inside


def test_a_transport_to_another_arena_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    transport = SimpleNamespace(close=lambda: closed.append(True))
    connector = SimpleNamespace(connect=lambda *session: transport, close=lambda: None)
    end, session = meeting(monkeypatch, connector)

    def refuse(*parts: object) -> None:
        raise ChannelError("the arena is not the session's")

    monkeypatch.setattr(runtime_end, "ChannelClient", refuse)
    with pytest.raises(ChannelError):
        asyncio.run(end._serving(session))
    assert closed == [True]
