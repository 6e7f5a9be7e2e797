"""Objects for gateways: valid, and the script that names requests by their beginning, run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.deploy.charts import DEPLOY, objects, one, pods, rendered, with_values
from tests.deploy.tools import KUBERNETES, import_folder
from tests.deploy.validation import errors_of

FOLDER = DEPLOY / "gateway"
ENVOY = objects((FOLDER / "envoy-prefix-hash.yaml").read_text())


@pytest.mark.parametrize("name", ["envoy-prefix-hash.yaml", "inference-pool.yaml"])
def test_objects_are_valid(name: str) -> None:
    found = objects((FOLDER / name).read_text())
    assert [error for each in found for error in errors_of(each, KUBERNETES[-1])] == []


def test_envoys_objects_fit_together() -> None:
    names = {(each["kind"], each["metadata"]["name"]) for each in ENVOY}
    for each in ENVOY:
        for target in each["spec"].get("targetRefs", []):
            assert (target["kind"], target["name"]) in names
    (rule,) = one(ENVOY, "HTTPRoute")["spec"]["rules"]
    assert [(ref["kind"], ref["name"]) for ref in rule["backendRefs"]] == [("Backend", "blink-dpus")]
    policy = one(ENVOY, "BackendTrafficPolicy")["spec"]
    assert policy["healthCheck"]["active"]["http"]["path"] == "/ready"
    # As much as blink-dpu takes by default.
    assert one(ENVOY, "ClientTrafficPolicy")["spec"]["connection"]["bufferLimit"] == "8Mi"


def test_the_pool_selects_the_charts_pods(tmp_path) -> None:
    pool = one(objects((FOLDER / "inference-pool.yaml").read_text()), "InferencePool")["spec"]
    values = {"plainHttp": {"enabled": True}, "openMetrics": True}
    (pod,) = pods(with_values("blink-dpu", tmp_path, values))
    labels = pod["metadata"]["labels"]
    wanted = pool["selector"]["matchLabels"]
    assert wanted["app.kubernetes.io/name"] == labels["app.kubernetes.io/name"]
    assert wanted.keys() <= labels.keys()
    assert labels["llm-d.ai/engine-type"] == "blink"
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert [port["number"] for port in pool["targetPorts"]] == [ports["http"]]
    assert pods(rendered("blink-gpu.defaults"))[0]["metadata"]["labels"].get("llm-d.ai/engine-type") is None


@pytest.fixture(scope="module")
def name_of() -> Iterator[Callable[[bytes | None], str]]:
    """What the script calls a request with this body."""
    folder = str(import_folder("lupa==2.6"))
    sys.path.insert(0, folder)
    lupa = importlib.import_module("lupa.luajit21")
    (script,) = one(ENVOY, "EnvoyExtensionPolicy")["spec"]["lua"]
    lua = lupa.LuaRuntime(encoding=None)
    lua.execute(script["inline"].encode())
    make = lua.eval(
        b"""function(text, set)
          local body = nil
          if text then
            body = {
              length = function() return #text end,
              getBytes = function(_, at, size) return text:sub(at + 1, at + size) end,
            }
          end
          return {
            body = function() return body end,
            headers = function() return {replace = function(_, name, value) set(name, value) end} end,
          }
        end"""
    )
    run = lua.globals()[b"envoy_on_request"]

    def name(text: bytes | None) -> str:
        said: dict[bytes, bytes] = {}
        run(make(text, said.__setitem__))
        assert list(said) == [b"x-blink-prefix"]
        return said[b"x-blink-prefix"].decode()

    yield name
    sys.path.remove(folder)


def chat(*texts: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({**more, "messages": messages}).encode()


def test_requests_that_begin_alike_have_one_name(name_of: Callable[[bytes | None], str]) -> None:
    system = "You are a patient teacher. " * 60
    assert name_of(chat(system, "one")) == name_of(chat(system, "quite another question", model="m", stream=True))
    assert name_of(chat("a different beginning", system)) != name_of(chat(system))
    assert name_of(b'{"model": "m", "prompt": "abc"}') == name_of(b'{"max_tokens": 5, "prompt": "abc"}')


def test_any_body_gets_a_name(name_of: Callable[[bytes | None], str]) -> None:
    names = {name_of(body) for body in (None, b"", b"\x00\xff\xfe", b"{", bytes(range(256)) * 100)}
    assert len(names) == 4  # none and empty are alike
    assert all(len(name) == 8 and int(name, 16) >= 0 for name in names)


def test_names_spread(name_of: Callable[[bytes | None], str]) -> None:
    assert len({name_of(chat(f"conversation {i}")) for i in range(2000)}) == 2000
