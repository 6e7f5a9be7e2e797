"""Checks of the tools that a request brings."""

from __future__ import annotations

from typing import Any

from dpu_service.api.errors import bad_value, shortened, unsupported
from dpu_service.api.nesting import check_limits
from dpu_service.text.tools.call_object import NAME

MOST_TOOLS = 128
MOST_NAMED = 32
"""Characters of a property's name in an error."""
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_SCHEMAS = ("items", "not", "additionalProperties", "contains", "propertyNames", "if", "then", "else")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def check_tools(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """For each function its parameters' schema.

    Raises:
        ApiError: 400, naming what is wrong with which tool.
    """
    if len(tools) > MOST_TOOLS:
        raise bad_value("tools", f"'tools' may have at most {MOST_TOOLS} tools")
    check_limits("tools", tools)
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        name, schema = _check_tool(f"tools[{i}]", tool)
        if name in schemas:
            raise bad_value(f"tools[{i}].function.name", f"there are two tools of the name '{name}'")
        schemas[name] = schema
    return schemas


def _check_tool(at: str, tool: dict[str, Any]) -> tuple[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"{at}.type", "only tools of type 'function' are supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_value(f"{at}.function", f"'{at}.function' must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise bad_value(f"{at}.function.name", f"'{at}.function.name' must be 1 to 128 of A-Z a-z 0-9 _ . : / -")
    if not isinstance(function.get("description"), str | None):
        raise bad_value(f"{at}.function.description", f"'{at}.function.description' must be a string")
    if function.get("strict") not in (None, False):
        raise unsupported(f"{at}.function.strict", "'strict' needs constrained decoding, which is not built")
    schema = function.get("parameters")
    if schema is not None:
        _check_parameters(f"{at}.function.parameters", schema)
    return name, schema


def _check_parameters(at: str, schema: Any) -> None:
    if not isinstance(schema, dict):
        raise bad_value(at, f"'{at}' must be a JSON schema of an object")
    if schema.get("type", "object") != "object":
        raise bad_value(f"{at}.type", f"'{at}.type' must be 'object'")
    _check_schema(at, schema)


def _check_schema(at: str, schema: Any) -> None:
    """The parts that everybody uses; others are not looked at. `check_limits` bounds the depth."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise bad_value(at, f"'{at}' must be a JSON schema")
    _check_type(f"{at}.type", schema.get("type", "object"))
    required, choices = schema.get("required", []), schema.get("enum", [None])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_value(f"{at}.required", f"'{at}.required' must be a list of names")
    if not isinstance(choices, list):
        raise bad_value(f"{at}.enum", f"'{at}.enum' must be a list")
    for key, inner in _inner_schemas(at, schema):
        _check_schema(f"{at}.{key}", inner)


def _check_type(at: str, given: Any) -> None:
    types = given if isinstance(given, list) else [given]
    if not types or not all(isinstance(one, str) and one in _TYPES for one in types):
        raise bad_value(at, f"'{at}' must be one of: {', '.join(_TYPES)}; or a list of them")


def _inner_schemas(at: str, schema: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [(key, schema[key]) for key in _SCHEMAS if key in schema]
    for key in _LISTS_OF_SCHEMAS:
        given = schema.get(key, [])
        if not isinstance(given, list):
            raise bad_value(f"{at}.{key}", f"'{at}.{key}' must be a list of JSON schemas")
        found += [(f"{key}[{i}]", inner) for i, inner in enumerate(given)]
    for key in _NAMED_SCHEMAS:
        given = schema.get(key, {})
        if not isinstance(given, dict):
            raise bad_value(f"{at}.{key}", f"'{at}.{key}' must be an object of JSON schemas")
        found += [(f"{key}.{shortened(name, MOST_NAMED)}", inner) for name, inner in given.items()]
    return found
