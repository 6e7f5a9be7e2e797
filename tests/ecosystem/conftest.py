"""The front end that all client packages talk to."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import chat_templates
from tests.ecosystem.told import make_told_device
from tests.front_end import FrontEnd, eventually, front_end

CLIENTS = Path(__file__).parent / "clients"
CHECK_SECONDS = 120


def pytest_configure(config: pytest.Config) -> None:
    """The marker of tests that run a client package in an environment of its own."""
    config.addinivalue_line("markers", "ecosystem: needs packages of its own (skipped where they cannot be installed)")


@pytest.fixture(scope="session")
def told_front() -> Iterator[FrontEnd]:
    """A front end whose device does what prompts say (see told.py)."""
    with front_end("--workers", "1", "--no-access-log", device=make_told_device()) as running:
        yield running


@pytest.fixture(scope="session")
def told_tools() -> Iterator[FrontEnd]:
    """The same for a model that calls tools in the manner of Hermes."""
    device = make_told_device(chat_templates.tokenizer().get_vocab_size())
    with front_end("--workers", "1", "--no-access-log", device=device, files=chat_templates.files("hermes")) as running:
        yield running


@pytest.fixture
def tool_checks(told_tools: FrontEnd) -> Iterator[Callable[..., None]]:
    """As `checks`, for that model."""
    yield lambda command, *more: _check([*command, told_tools.http, *more])
    eventually(lambda: told_tools.device.playing == 0)
    assert told_tools.device.channels[0].protocol_errors == 0


@pytest.fixture
def checks(told_front: FrontEnd) -> Iterator[Callable[..., None]]:
    """Runs a client program with the server's address; every check in it must hold, and nothing may go on after it."""
    yield lambda command, *more: _check([*command, told_front.http, *more])
    eventually(lambda: told_front.device.playing == 0)
    assert told_front.device.channels[0].protocol_errors == 0


def _check(command: list[str]) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False, env=clean)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    assert done.returncode == 0, done.stdout + done.stderr
    assert results, "no check was made"
    failures = {result["check"]: result["error"] for result in results if result["error"]}
    assert not failures, "\n".join(f"{name}:\n{error}" for name, error in failures.items())
