"""Shared models: converted and built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_runtime.model.source import ModelFolder, resolve_model


@pytest.fixture(scope="session")
def default_model() -> ModelFolder:
    """The built-in default model; converted into the user's cache on the first use."""
    return resolve_model("smollm2-135m-instruct", lambda done, total, what: None)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Llama, saved by transformers."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"), "llama")
