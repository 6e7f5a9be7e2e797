"""Servers that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import Serving, serving
from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The default model on the soft GPU, as `make serve` starts it, but for its memory, which a test looks at."""
    with serving(tmp_path_factory.mktemp("default"), "smollm2-135m-instruct", BLINK_CORE_DUMPS="1") as started:
        yield started


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a byte-level tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("tiny-model"), "llama")


@pytest.fixture
def tiny_server(tiny_model: Path, tmp_path: Path) -> Iterator[Serving]:
    """A server of one's own with the tiny model."""
    with serving(tmp_path, str(tiny_model), "tiny") as started:
        yield started
