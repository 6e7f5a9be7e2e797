"""The stand-in for DOCA's libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blink_proto.doca import context
from dpu_service.transport.doca import session
from tests.transport.doca.build import shim_folder
from tests.transport.kinds import DOCA_ADDRESS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Both have the same names for what others load, so they do not go together in one process."""
    for item in items:
        if DOCA_ADDRESS and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="the stand-in cannot be loaded beside DOCA itself"))


@pytest.fixture(scope="session")
def doca_shim() -> Path:
    """The folder with both libraries."""
    return shim_folder()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Every context became idle, and every session was taken down."""
    yield
    assert not context._not_idle
    assert not session._left_behind
