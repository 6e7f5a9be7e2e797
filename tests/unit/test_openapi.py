"""The OpenAPI document by itself: valid, complete, and everything in it described."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator, ValidationError
from openapi_spec_validator import OpenAPIV31SpecValidator

from dpu_service.api.app import ONE_MODEL, ROUTES
from dpu_service.api.deadline import HEADER, LONGEST_SECONDS
from dpu_service.api.openapi import document
from dpu_service.api.requests import ChatRequest, CompletionRequest, read_request
from tests.openapi import DOCUMENT, judge_request

SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def test_the_document_is_valid() -> None:
    OpenAPIV31SpecValidator(msgspec.json.decode(document.encoded())).validate()
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_every_route_is_in_it_and_nothing_else() -> None:
    routes = {path: method.lower() for path, (method, _) in ROUTES.items()}
    routes[ONE_MODEL + "{model}"] = "get"
    assert {path: next(iter(methods)) for path, methods in DOCUMENT["paths"].items()} == routes
    assert all(len(methods) == 1 for methods in DOCUMENT["paths"].values())


def test_everything_is_described() -> None:
    for name, schema in SCHEMAS.items():
        assert schema.get("description"), name
        if name.endswith("Request"):
            for field, described in schema["properties"].items():
                assert described.get("description") or "$ref" in str(described), f"{name}.{field}"
    names = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


def test_errors_have_the_error_object_and_keys_are_asked_for() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            assert ("401" in operation["responses"]) == ("security" not in operation), path
            for status, answer in operation["responses"].items():
                schema = answer["content"].get("application/json", {}).get("schema")
                if status != "200" and (path, status) != ("/ready", "503"):
                    assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}, (path, status)


def test_the_clients_time_is_a_header_of_completions_alone() -> None:
    heeding = {}
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            for one in operation.get("parameters", []):
                if one["in"] == "header":
                    heeding[path] = one
    assert set(heeding) == {"/v1/completions", "/v1/chat/completions"}
    for one in heeding.values():
        assert one["name"].encode().lower() == HEADER
        assert not one.get("required", False)
        judge = Draft202012Validator(one["schema"]).is_valid
        assert [judge(value) for value in (0, 0.5, LONGEST_SECONDS, LONGEST_SECONDS + 1)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 2, None], [-0.1, 2.1, "1", True]),
        ("top_p", [0.001, 1], [0, 1.1]),
        ("top_k", [-1, 0, 5], [-2, 1.5]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("seed", [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
        ("n", [1, 128], [0, 129]),
        ("stop", ["a", ["a"] * 16], [["a"] * 17, 5]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 100], [0, 101]),
        ("min_tokens", [0], [-1]),
        ("stream", [True, False, None], ["yes", 1]),
    ],
)
def test_the_document_and_the_decoder_agree(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        body = {"model": "m", "prompt": "x", field: value}
        judge_request("CompletionRequest", body)
        read_request(msgspec.json.encode(body), CompletionRequest)
    for value in bad:
        body = {"model": "m", "prompt": "x", field: value}
        with pytest.raises(ValidationError):
            judge_request("CompletionRequest", body)
        with pytest.raises(Exception, match=field):
            read_request(msgspec.json.encode(body), CompletionRequest)


def test_examples_are_requests() -> None:
    for path, kind in (("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)):
        content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        judge_request(kind.__name__, content["example"])
        read_request(msgspec.json.encode(content["example"]), kind)
