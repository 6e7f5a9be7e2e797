"""What needs a CUDA device: skipped, with the reason, where there is none.

`BLINK_TEST_DEVICE=cpu` runs the tests of the chain on the soft GPU instead, to work on the tests themselves.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.shared_chain import SharedChain

DEVICE = os.environ.get("BLINK_TEST_DEVICE", "cuda")
_HOST_LIBRARIES = ("gpu_runtime._host_scheduler", "dpu_service._shm")
_SERVING = ("httpx", "cryptography", "gpu_runtime.main", "dpu_service.main", "dpu_service.worker", "blink_deploy.main")


def missing() -> str:
    """Why nothing can run on a GPU here, or an empty string."""
    if shutil.which("nvcc") is None:
        return "nvcc is not installed"
    return missing_device()


@cache
def missing_device() -> str:
    """Why there is no CUDA device to use, or an empty string."""
    if shutil.which("nvidia-smi") is None:
        return "there is no CUDA device"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return "" if listed.returncode == 0 and "GPU" in listed.stdout else "there is no CUDA device"


@cache
def missing_chain() -> str:
    """Why no chain can run here, or an empty string."""
    for name in _HOST_LIBRARIES:
        if find_spec(name) is None and not _shm_is_built(name):
            return f"{name} is not built (make test-gpu builds it where there is g++)"
    if DEVICE == "cpu":
        return ""
    if reason := missing_device():
        return reason
    for module in ("torch", "triton", "cuda.bindings.driver"):
        if reason := cannot_import(module):
            return reason
    return ""


@cache
def missing_serving() -> str:
    """Why `blink up` cannot serve over HTTPS here, or an empty string."""
    return missing_chain() or next(filter(None, map(cannot_import, _SERVING)), "")


@cache
def cannot_import(name: str) -> str:
    """Why a module cannot be imported, or an empty string: it is missing, or others are too old for it."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{name} cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _shm_is_built(name: str) -> bool:
    return name == "dpu_service._shm" and not cannot_import("dpu_service.transport.native")


@pytest.fixture(scope="session")
def device_scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The scheduler built for this machine's GPU; every HostScheduler made meanwhile runs there."""
    from gpu_runtime.scheduler import host
    from tests.gpu.build import build_scheduler

    if reason := missing():
        pytest.skip(reason)
    library = build_scheduler(tmp_path_factory.mktemp("device") / "device_scheduler.so")
    host.use_library(library)
    yield library
    host.use_library(None)


@pytest.fixture(scope="session")
def device() -> str:
    """Where the chain runs."""
    if reason := missing_chain():
        pytest.skip(reason)
    return DEVICE


@pytest.fixture(scope="session")
def serving_device(device: str) -> str:
    """The same for tests that go through `blink up`."""
    if reason := missing_serving():
        pytest.skip(reason)
    return device


@pytest.fixture(scope="session")
def small_model(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a tokenizer of one token a letter."""
    if reason := cannot_import("transformers"):
        pytest.skip(reason)
    from tests.gpu.small import save_small

    return save_small(tmp_path_factory.mktemp("small-model"), "Llama")


@pytest.fixture(scope="session")
def real_model(device: str) -> Path:
    """SmolLM2-135M-Instruct: `BLINK_TEST_MODEL` names its folder, else the installed built-in model."""
    if named := os.environ.get("BLINK_TEST_MODEL"):
        return Path(named)
    if reason := cannot_import("transformers"):
        pytest.skip(reason)
    from gpu_runtime.model.errors import ModelError
    from gpu_runtime.model.source import DEFAULT_NAME, resolve_model

    try:
        return resolve_model(DEFAULT_NAME, lambda done, total, what: None).path
    except (ModelError, ImportError) as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not here (BLINK_TEST_MODEL can name its folder): {error}")


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[SharedChain]:
    """A chain with the module's options, `CHAIN`; ends with the module."""
    from tests.gpu.shared_chain import SharedChain

    made = SharedChain(**request.module.CHAIN)
    yield made
    made.stop()


@pytest.fixture
def own_device(shared: SharedChain, device: str) -> str:
    """The device, on which no other chain runs."""
    shared.stop()
    return device
