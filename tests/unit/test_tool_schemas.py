"""Checks of tools, on random JSON that is nearly a list of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpu_service.api.errors import ApiError
from dpu_service.api.nesting import MOST_CHARACTERS, MOST_VALUES, check_limits
from dpu_service.api.tool_schemas import check_tools

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
types = st.sampled_from(
    ["string", "number", "integer", "boolean", "object", "array", "null", "text", 5, ["string"], []]
)
schemas: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | anything | st.fixed_dictionaries({"type": types}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": types,
            "properties": st.dictionaries(st.text(max_size=3), inner, max_size=2) | anything,
            "required": st.lists(st.text(max_size=3), max_size=2) | anything,
            "items": inner,
            "anyOf": st.lists(inner, max_size=2) | anything,
            "enum": st.lists(anything, max_size=2) | anything,
            "additionalProperties": inner,
        },
    ),
    max_leaves=4,
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a.b-c", "", "a b", 5])},
    optional={"description": anything, "parameters": schemas, "strict": anything, "more": anything},
)
tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function") | anything, "function": functions | anything}), max_size=3
)


def plainly_right(schema: Any) -> bool:
    """The same rules written down once more."""
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict):
        return False
    given = schema.get("type", "object")
    named = {"string", "number", "integer", "boolean", "object", "array", "null"}
    if not all(isinstance(one, str) and one in named for one in (given if isinstance(given, list) else [given])):
        return False
    lists = all(isinstance(schema.get(key, []), list) for key in ("required", "enum", "anyOf"))
    if given == [] or not lists or not isinstance(schema.get("properties", {}), dict):
        return False
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        return False
    inner = [*schema.get("properties", {}).values(), *schema.get("anyOf", [])]
    inner += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return all(map(plainly_right, inner))


def right(tool: Any) -> bool:
    function = tool["function"]
    if tool["type"] != "function" or not isinstance(function, dict) or function.get("name") not in ("f", "g", "a.b-c"):
        return False
    parameters = function.get("parameters")
    if parameters is not None and not (isinstance(parameters, dict) and parameters.get("type", "object") == "object"):
        return False
    described = isinstance(function.get("description"), str | None)
    return described and function.get("strict") in (None, False) and (parameters is None or plainly_right(parameters))


@given(given=tools)
@settings(max_examples=300, deadline=None)
def test_tools_are_taken_or_refused_by_name(given: list[dict[str, Any]]) -> None:
    names = [tool["function"].get("name") if isinstance(tool["function"], dict) else None for tool in given]
    fits = all(map(right, given)) and len(set(map(str, names))) == len(names)
    if fits:
        assert list(check_tools(given)) == names
        return
    with pytest.raises(ApiError) as caught:
        check_tools(given)
    assert caught.value.status == 400
    assert str(caught.value.param).startswith("tools")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (json.loads("[" * 40 + "]" * 40), "deeper"),
        ([0] * (MOST_VALUES + 1), "values"),
        ([[0] * 1000] * 100, "values"),
        ("x" * (MOST_CHARACTERS + 1), "characters"),
        ({"x" * (MOST_CHARACTERS + 1): 1}, "characters"),
    ],
)
def test_values_over_the_limits(value: Any, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        check_limits("x", value)


def test_values_within_the_limits() -> None:
    check_limits("x", json.loads("[" * 32 + "]" * 32))
    check_limits("x", [0] * (MOST_VALUES - 1))
    check_limits("x", {"x": "y" * (MOST_CHARACTERS - 1)})


def test_errors_do_not_grow_with_names() -> None:
    parameters: Any = 5
    for _ in range(14):
        parameters = {"properties": {"x" * 10_000: parameters}}
    with pytest.raises(ApiError) as caught:
        check_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert len(caught.value.message) < 1000
