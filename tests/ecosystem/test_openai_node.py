"""The openai package for Node."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ecosystem.conftest import CLIENTS
from tests.ecosystem.environments import node_with


@pytest.mark.ecosystem
def test_openai_node(checks: Callable[..., None]) -> None:
    folder = node_with("openai")
    checks(["node", str(CLIENTS / "openai_node.mjs")], str(folder))


@pytest.mark.ecosystem
def test_tools(tool_checks: Callable[..., None]) -> None:
    folder = node_with("openai")
    tool_checks(["node", str(CLIENTS / "openai_node_tools.mjs")], str(folder))
