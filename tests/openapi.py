"""The OpenAPI document as a judge of real answers."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from dpu_service.api.openapi.document import document

DOCUMENT = document()


def closed(schema: Any) -> Any:
    """A schema that admits no property beside those it lists, at any depth: a field without a description is found."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


_CLOSED = closed(DOCUMENT["components"])


def judge(schema: dict[str, Any], value: Any) -> None:
    """Raises where an answer is not as described.

    Raises:
        jsonschema.ValidationError: it is not.
    """
    Draft202012Validator({**closed(schema), "components": _CLOSED}).validate(value)


def judge_request(name: str, value: Any) -> None:
    """Raises where the body of a request is not as described; it may have fields that are not listed.

    Raises:
        jsonschema.ValidationError: it is not.
    """
    _requests(name).validate(value)


@cache
def _requests(name: str) -> Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return Draft202012Validator(schema)


def check_answer(path: str, answer: httpx.Response) -> None:
    """Holds an answer, or each event of a stream, against the document; `path` is a route's template."""
    (operation,) = DOCUMENT["paths"][path].values()
    described = operation["responses"][str(answer.status_code)]
    media = answer.headers["content-type"].split(";")[0]
    content = described["content"][media]
    assert set(described.get("headers", {})) <= {name.title() for name in answer.headers}
    if media == "text/event-stream":
        for event in _events(answer):
            chunk, error, _ = content["schema"]["properties"]["data"]["anyOf"]
            judge((error if "error" in event else chunk)["contentSchema"], event)
    elif media == "application/json":
        judge(content["schema"], answer.json())


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]
