"""Builds the OpenAPI 3.1 document from the structs of requests and answers."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from blink_proto import VERSION
from dpu_service.api.deadline import LONGEST_SECONDS
from dpu_service.api.openapi.answers import ErrorAnswer
from dpu_service.api.openapi.operations import ERRORS, OPERATIONS, Operation
from dpu_service.api.requests import StreamOptions
from dpu_service.api.unbuilt import HARMLESS, unbuilt_fields

JSON, EVENTS = "application/json", "text/event-stream"
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}}
DEADLINE = {
    "name": "X-Request-Timeout",
    "in": "header",
    "description": "Seconds from the request's arrival after which nobody wants the answer: it ends then, also on the "
    "device, with status 504, or in a stream with an event.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": int(LONGEST_SECONDS)},
}
STREAM_TEXT = (
    "With `stream`: server-sent events; this is the schema of one. A failure after the first token is an event with an "
    "error object. The last event is `[DONE]`."
)

_BODIES: list[type[msgspec.Struct]] = [one.request for one in OPERATIONS.values() if one.request is not None]
_BODIES.append(StreamOptions)
_REFUSED = {kind.__name__: unbuilt_fields(kind) for kind in _BODIES}


@cache
def encoded() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """The document as plain objects."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Blink",
            "version": VERSION,
            "description": "OpenAI-compatible completions. Fields of requests that are not listed are ignored. Whole "
            "numbers are written without a decimal point.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}],
        "paths": {path: {one.method: _operation(path, one)} for path, one in OPERATIONS.items()},
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key. A server that was started without keys takes requests without one.",
                }
            },
        },
    }


def _schemas() -> dict[str, Any]:
    kinds: list[type[msgspec.Struct]] = [ErrorAnswer]
    for one in OPERATIONS.values():
        kinds += [kind for kind in (one.request, one.answer, one.event, *one.others.values()) if kind is not None]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for name, schema in components.items():
        for field, described in schema.get("properties", {}).items():
            _lift_description(described)
            if field in _REFUSED.get(name, ()):
                described["enum"] = [None, *HARMLESS[field]]
    return components


def _lift_description(field: dict[str, Any]) -> None:
    """From the first alternative, where msgspec puts it for what may be null too, to the field itself."""
    for alternative in field.get("anyOf", []):
        if "description" in alternative:
            field.setdefault("description", alternative.pop("description"))


def _operation(path: str, one: Operation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "responses": _responses(one),
    }
    if one.open:
        made["security"] = []
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if one.deadline:
        made["parameters"] = [DEADLINE]
    if one.request is not None:
        content = {"schema": _reference(one.request), "example": one.example}
        made["requestBody"] = {"required": True, "content": {JSON: content}}
    return made


def _responses(one: Operation) -> dict[str, Any]:
    responses = {"200": {"description": "Success.", "content": _success(one)}}
    for status, kind in one.others.items():
        responses[str(status)] = {
            "description": _summary(kind),
            "headers": RETRY_AFTER,
            "content": {JSON: {"schema": _reference(kind)}},
        }
    for status in one.errors:
        responses[str(status)] = _error(status)
    return dict(sorted(responses.items()))


def _success(one: Operation) -> dict[str, Any]:
    if one.answer is None:
        return {one.media: {"schema": {"type": "object"} if one.media == JSON else {"type": "string"}}}
    content: dict[str, Any] = {JSON: {"schema": _reference(one.answer)}}
    if one.event is not None:
        content[EVENTS] = {"schema": _event(one.event)}
    return content


def _event(kind: type[msgspec.Struct]) -> dict[str, Any]:
    data = [{"contentMediaType": JSON, "contentSchema": _reference(one)} for one in (kind, ErrorAnswer)]
    properties = {"data": {"type": "string", "anyOf": [*data, {"const": "[DONE]"}]}}
    return {"type": "object", "description": STREAM_TEXT, "required": ["data"], "properties": properties}


def _error(status: int) -> dict[str, Any]:
    described: dict[str, Any] = {
        "description": ERRORS[status],
        "content": {JSON: {"schema": _reference(ErrorAnswer)}},
    }
    if status in (429, 503):
        described["headers"] = RETRY_AFTER
    return described


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _summary(kind: type[msgspec.Struct]) -> str:
    return (kind.__doc__ or "").splitlines()[0]
