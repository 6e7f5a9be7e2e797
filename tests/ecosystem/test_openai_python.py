"""The openai package for Python: the first, the second and the newest major version."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ecosystem.conftest import CLIENTS
from tests.ecosystem.environments import python_with


@pytest.mark.ecosystem
@pytest.mark.parametrize("requirement", ["openai>=1.60,<2", "openai>=2,<3", "openai>=3"])
def test_openai_python(checks: Callable[..., None], requirement: str) -> None:
    checks([str(python_with(requirement)), str(CLIENTS / "openai_python.py")])
