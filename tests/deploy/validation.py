"""Strict validation of objects without a cluster: Kubernetes' own kinds by its schemas, others by `kinds.yaml`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

from tests.deploy.charts import Object
from tests.deploy.tools import kubernetes_schemas


def errors_of(found: Object, version: str) -> list[str]:
    """What is wrong with an object; empty for nothing."""
    key = f"{found['apiVersion']}/{found['kind']}"
    validator = _ours().get(key) or _kubernetes(version, found["apiVersion"], found["kind"])
    return [f"{key} {error.json_path}: {error.message}" for error in validator.iter_errors(found)]


@functools.cache
def _ours() -> dict[str, Any]:
    content = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text())
    definitions = content["definitions"]
    return {key: _whole(key, spec, definitions) for key, spec in content["kinds"].items()}


def _whole(key: str, spec: dict[str, Any], definitions: dict[str, Any]) -> Any:
    api_version, _, kind = key.rpartition("/")
    schema = {
        "definitions": definitions,
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": api_version},
            "kind": {"const": kind},
            "metadata": {"$ref": "#/definitions/metadata"},
            "spec": spec,
        },
    }
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@functools.cache
def _kubernetes(version: str, api_version: str, kind: str) -> Any:
    folder = kubernetes_schemas(version)
    group, _, number = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.split(".")[0], number) if part)
    path = folder / f"{name}.json"
    assert path.exists(), f"neither Kubernetes nor kinds.yaml knows {api_version} {kind}"
    return jsonschema.Draft202012Validator(json.loads(path.read_text()), registry=_registry(version))


@functools.cache
def _registry(version: str) -> Any:
    definitions = json.loads((kubernetes_schemas(version) / "_definitions.json").read_text())
    return Resource.from_contents(definitions) @ Registry()
