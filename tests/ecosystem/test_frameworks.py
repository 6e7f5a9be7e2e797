"""Packages that applications put over the API: LiteLLM and LangChain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ecosystem.conftest import CLIENTS
from tests.ecosystem.environments import python_with


@pytest.mark.ecosystem
def test_litellm(checks: Callable[..., None]) -> None:
    checks([str(python_with("litellm")), str(CLIENTS / "litellm_client.py")])


@pytest.mark.ecosystem
@pytest.mark.parametrize(
    ("package", "program"), [("litellm", "litellm_tools.py"), ("langchain-openai", "langchain_tools.py")]
)
def test_tools(tool_checks: Callable[..., None], package: str, program: str) -> None:
    tool_checks([str(python_with(package)), str(CLIENTS / program)])


@pytest.mark.ecosystem
def test_langchain(checks: Callable[..., None]) -> None:
    checks([str(python_with("langchain-openai")), str(CLIENTS / "langchain_client.py")])
