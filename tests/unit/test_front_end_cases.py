"""Every known kind of fault of a front end has its tests, or a reason for having none."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.front_end_cases import CASES, Case

TESTS = Path(__file__).resolve().parent.parent


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_it_has_tests_or_a_reason(case: Case) -> None:
    assert case.about
    assert bool(case.tests) != bool(case.left_out)
    for test in case.tests:
        file, function = test.split("::")
        assert function.startswith("test_")
        assert function in functions(file), f"{test} is gone"
