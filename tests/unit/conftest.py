"""Shared models and libraries, converted and built once, and a shared front end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_runtime.model.source import ModelFolder, resolve_model
from gpu_runtime.scheduler import host
from tests.emulation.build import build_emulated
from tests.emulation.relayed import Relayed
from tests.front_end import FrontEnd, eventually, front_end
from tests.replay import Script


@pytest.fixture(scope="session")
def default_model() -> ModelFolder:
    """The built-in default model; converted into the user's cache on the first use."""
    return resolve_model("smollm2-135m-instruct", lambda done, total, what: None)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Llama, saved by transformers."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="session")
def plain_front_end() -> Iterator[FrontEnd]:
    """One worker over a scripted device, for all modules that want nothing special of it."""
    with front_end("--workers", "1", "--no-access-log") as running:
        yield running


@pytest.fixture
def front(plain_front_end: FrontEnd) -> Iterator[FrontEnd]:
    """The shared front end with nothing asked yet. Afterwards all that runs on its device has ended."""
    device = plain_front_end.device
    device.submissions.clear()
    yield plain_front_end
    device.script = lambda submission: Script([0])
    eventually(lambda: device.playing == 0)
    device.submissions.clear()
    device.cancelled.clear()
    assert device.channels[0].protocol_errors == 0


@pytest.fixture(scope="session")
def relay_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The relay and the scheduler on emulated threads."""
    return build_emulated("relay.cpp", tmp_path_factory.mktemp("relay"))


@pytest.fixture
def relayed(relay_library: Path) -> Iterator[Relayed]:
    """A scheduler behind the relay."""
    host.use_library(relay_library)
    yield Relayed(relay_library)
    host.use_library(None)
