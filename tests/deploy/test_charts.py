"""Charts by Helm itself, and what becomes of them."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
import yaml

from tests.deploy.charts import ALL, CHARTS, RELEASE, Case, arguments_of, objects, rendered, run_helm, template
from tests.deploy.golden import golden_path, golden_text
from tests.deploy.tools import HELMS, KUBERNETES
from tests.deploy.validation import errors_of

EVERY = pytest.mark.parametrize("case", ALL.values(), ids=ALL)
MAJORS = pytest.mark.parametrize("major", HELMS)


@EVERY
@MAJORS
def test_lint_finds_nothing(case: Case, major: str) -> None:
    chart, *values = arguments_of(case)
    done = run_helm(major, "lint", "--strict", chart, *values)
    said = [line for line in done.stdout.splitlines() if line.startswith("[") and "icon is recommended" not in line]
    assert (done.returncode, said) == (0, []), done.stdout + done.stderr


@EVERY
@MAJORS
def test_what_is_rendered_is_what_was_kept(case: Case, major: str) -> None:
    """Look at the difference, and if it is meant: python -m tests.deploy.golden."""
    kept, now = golden_path(case).read_text(), golden_text(case, major)
    assert now == kept, "\n".join(difflib.unified_diff(kept.splitlines(), now.splitlines(), "kept", "now", lineterm=""))


@EVERY
@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_have_no_unknown_or_wrong_field(case: Case, version: str) -> None:
    assert [error for each in rendered(case) for error in errors_of(each, version)] == []


def test_a_wrong_field_is_found() -> None:
    found = rendered("blink-dpu.full")
    for each in found:
        for place in (each, each["metadata"], each.get("spec")):
            if place is not None:
                place["surprise"] = 1
                assert errors_of(each, KUBERNETES[-1]), each["kind"]
                del place["surprise"]


@EVERY
def test_names_hold_the_release_and_fit(case: Case) -> None:
    for each in rendered(case):
        name = each["metadata"]["name"]
        assert RELEASE in name
        assert len(name) <= 63


def test_long_release_names_still_fit() -> None:
    for chart in ("blink-gpu", "blink-dpu", "blink-single"):
        done = run_helm("4", "template", "r" * 53, str(CHARTS / chart))
        assert done.returncode == 0, done.stderr
        assert all(len(each["metadata"]["name"]) <= 63 for each in objects(done.stdout))


def test_two_releases_share_no_name_and_no_pods() -> None:
    for case in (ALL["blink-gpu.full"], ALL["blink-dpu.full"], ALL["blink-single.full"]):
        first, second = (
            objects(run_helm("4", "template", name, *arguments_of(case)).stdout) for name in ("one", "other")
        )
        names = [{(each["kind"], each["metadata"]["name"]) for each in found} for found in (first, second)]
        assert not names[0] & names[1]
        selectors = [
            [yaml.dump(each["spec"].get("selector")) for each in found if each["kind"] == "Service"]
            for found in (first, second)
        ]
        assert not set(selectors[0]) & set(selectors[1])


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("blink-gpu", {"imag": {}}),
    ("blink-gpu", {"image": {"repository": "registry.internal/blink", "tag": "latest"}}),
    ("blink-gpu", {"image": {"repository": "registry.internal/blink", "digest": "sha256:12"}}),
    ("blink-gpu", {"replicas": 0}),
    ("blink-gpu", {"device": "rocm"}),
    ("blink-gpu", {"transport": "shm"}),
    ("blink-gpu", {"runtime": {"memoryShare": 1.5}}),
    ("blink-gpu", {"runtime": {"channels": 65}}),
    ("blink-gpu", {"controlPlane": {"port": 0}}),
    ("blink-gpu", {"controlPlane": {"service": {"nodePort": 80}}}),
    ("blink-gpu", {"controlPlane": {"tls": {"secretName": "-----BEGIN PRIVATE KEY-----"}}}),
    ("blink-gpu", {"model": {"download": {"repository": "a/b", "revision": "main"}}}),
    ("blink-gpu", {"model": {"download": {"repository": "a/b"}}}),
    ("blink-gpu", {"model": {"download": {"repository": "a/b", "revision": "0" * 40}, "volume": {"emptyDir": {}}}}),
    ("blink-gpu", {"networkPolicy": {"frontEnds": [{}]}}),
    ("blink-gpu", {"networkPolicy": {"privateLink": ["everywhere"]}}),
    ("blink-gpu", {"controlPlane": {"tls": {"certManager": {"enabled": True}}}}),
    ("blink-dpu", {"serviceDaemonSet": {"nodeSelector": {"dpu": "yes"}}}),
    ("blink-dpu", {"serviceDaemonSet": {"resources": {"requests": {"cpu": "1"}}}}),
    ("blink-dpu", {"serviceDaemonSet": {"labels": {"a": 1}}}),
    ("blink-dpu", {"exposedPorts": {"ports": {"grpc": True}}}),
    ("blink-dpu", {"exposedPorts": {"ports": {"https": "yes"}}}),
    ("blink-dpu", {"exposedPorts": {"ports": {"http": True}}}),
    ("blink-dpu", {"runtime": {"addresses": ["no-port"]}}),
    ("blink-dpu", {"runtime": {"addresses": []}}),
    ("blink-dpu", {"runtime": {"addresses": ["gpu:50051", "gpu:50051"]}}),
    ("blink-single", {"gpus": 0}),
    ("blink-dpu", {"https": {"minVersion": "1.1"}}),
    ("blink-dpu", {"https": {"clientCaSecret": {"name": "ca"}}}),
    ("blink-dpu", {"https": {"certManager": {"enabled": True, "issuerRef": {"name": "a"}}}}),
    ("blink-dpu", {"apiKeys": {"secretName": "sk_LIVE_KEY"}}),
    ("blink-dpu", {"apiKeys": {"keys": ["a"]}}),
    ("blink-dpu", {"service": {"workers": 0}}),
    ("blink-dpu", {"service": {"toolParser": "xml"}}),
    ("blink-dpu", {"rdma": {"interface": "a name too long for one"}}),
    ("blink-dpu", {"rdma": {"address": "banana"}}),
    ("blink-dpu", {"rdma": {"address": "224.0.0.1"}}),
    ("blink-gpu", {"rdma": {"address": "192.168.200.256"}}),
    ("blink-dpu", {"serviceMonitor": {"enabled": True}}),
    ("blink-dpu", {"serviceMonitor": {"enabled": True, "keySecret": {"name": "a"}}}),
    ("blink-single", {"device": "tpu"}),
    ("blink-single", {"apiKeys": {"open": False}}),
    ("blink-single", {"service": {"type": "ExternalName"}}),
]


@pytest.mark.parametrize(
    ("chart", "values"), WRONG, ids=lambda value: yaml.dump(value, default_flow_style=True)[:60].strip()
)
def test_wrong_values_are_refused(chart: str, values: dict[str, Any], tmp_path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run_helm("4", "template", RELEASE, str(CHARTS / chart), "--values", str(path))
    assert done.returncode != 0
    # By the name of the value that is wrong, and not by a failure within a template.
    assert "nil pointer" not in done.stderr
    assert any(word in done.stderr for word in (*values, *_names(values))), done.stderr


def _names(values: Any) -> list[str]:
    return [name for key, inner in values.items() for name in (key, *_names(inner))] if isinstance(values, dict) else []


def test_helm_3_refuses_them_too(tmp_path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("replicas: 0\n")
    assert run_helm("3", "template", RELEASE, str(CHARTS / "blink-gpu"), "--values", str(path)).returncode != 0


@pytest.mark.parametrize("chart", ["blink-gpu", "blink-dpu", "blink-single"])
def test_every_value_is_in_the_schema_and_documented(chart: str) -> None:
    """The schema describes the file of values and nothing else, so that no value is left undocumented."""
    import json

    values = yaml.safe_load((CHARTS / chart / "values.yaml").read_text())
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
    assert _tree(values, schema) == []


def _tree(values: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    schema = schema if "$ref" not in schema else {}
    known = schema.get("properties")
    if known is None or not isinstance(values, dict) or not values:
        return []
    different = {f"{path}.{name}" for name in values.keys() ^ (known.keys() - {"global"})}
    inner = [
        each for name in values.keys() & known.keys() for each in _tree(values[name], known[name], f"{path}.{name}")
    ]
    return sorted(different) + inner


def test_notes_say_what_is_missing() -> None:
    done = run_helm("4", "install", RELEASE, str(CHARTS / "blink-dpu"), "--dry-run=client", "--namespace", "serving")
    notes = done.stdout.partition("NOTES:")[2]
    for name in ("acme-blink-dpu-control", "acme-blink-dpu-https", "acme-blink-dpu-keys", "Nothing leads to it"):
        assert name in notes, done.stderr
    done = run_helm("4", "install", RELEASE, *arguments_of(ALL["blink-dpu.open"]), "--dry-run=client")
    assert "WARNING: no API keys" in done.stdout
    assert "no TLS" in done.stdout


def notes(case: str) -> str:
    done = run_helm("4", "install", RELEASE, *arguments_of(ALL[case]), "--dry-run=client", "--namespace", "serving")
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_notes_of_the_runtime_say_what_is_missing() -> None:
    said = notes("blink-gpu.defaults")
    for words in ("acme-blink-gpu-control", "blinkctl certs init", "lets no front end in yet", "port 30051"):
        assert words in said
    assert "no TLS" not in said
    said = notes("blink-gpu.insecure")
    assert "WARNING: the control plane has no TLS" in said
    assert "acme-blink-gpu-control.serving.svc:50051" in said
    assert "waits for" not in said


def test_notes_of_the_single_pod_say_how_to_ask() -> None:
    said = notes("blink-single.defaults")
    for words in ("the soft GPU", "port-forward service/acme-blink-single", "helm -n serving test acme"):
        assert words in said
    assert "WARNING: no API keys" in said
    assert "2 GPU(s)" in notes("blink-single.full")
    assert "WARNING" not in notes("blink-single.full")


def test_notes_of_the_front_end_name_every_runtime() -> None:
    assert "link.internal:50051 and $(NODE_NAME).link.internal:50052" in notes("blink-dpu.full")


def test_rendering_twice_gives_the_same() -> None:
    chart = arguments_of(ALL["blink-gpu.full"])
    assert template("4", *chart) == template("4", *chart)
