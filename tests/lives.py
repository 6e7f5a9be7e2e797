"""A control plane's lives over chains that are not there, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpu_runtime.chain import process
from gpu_runtime.config import make_config
from gpu_runtime.control.runtime import Runtime


def ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""


def play_lives(monkeypatch: pytest.MonkeyPatch, scene: Callable[[Runtime], Awaitable[None]], **choices: Any) -> None:
    """A runtime with these choices, until the end of the scene."""
    monkeypatch.setitem(process._MODULES, "cpu", "tests.standin.idle")

    async def run() -> None:
        runtime = Runtime(make_config("cpu", channels=1, kv_tokens=64, **choices))
        try:
            await scene(runtime)
        finally:
            await runtime.close(0.0)

    asyncio.run(run())
