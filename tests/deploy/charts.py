"""Renders the charts with sets of values."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import helm

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
CHARTS = DEPLOY / "charts"
CASES = Path(__file__).parent / "cases"
RELEASE, NAMESPACE = "acme", "serving"
Object = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A chart and a file of values; none: the chart's own."""

    name: str
    chart: str
    values: Path | None = None


def _cases() -> dict[str, Case]:
    found = [Case(f"{chart}.defaults", chart) for chart in ("blink-gpu", "blink-dpu", "blink-single")]
    found += [Case(path.stem, path.stem.split(".")[0], path) for path in sorted(CASES.glob("*.yaml"))]
    found.append(Case("blink-gpu.example", "blink-gpu", DEPLOY / "examples" / "gpu.yaml"))
    found.append(Case("blink-dpu.example", "blink-dpu", DEPLOY / "examples" / "dpu-plain-kubernetes.yaml"))
    return {case.name: case for case in found}


ALL = _cases()
"""By name: chart and what is special about the values."""


def run_helm(major: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Helm without any configuration of the user's."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    command = [str(helm(major)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def arguments_of(case: Case) -> list[str]:
    """Chart and values, as Helm takes them."""
    return [str(CHARTS / case.chart), *(["--values", str(case.values)] if case.values else [])]


@functools.cache
def rendered_text(case: Case, major: str = "4") -> str:
    """What Helm makes of a case."""
    return template(major, *arguments_of(case))


def template(major: str, *arguments: str) -> str:
    """The output of `helm template`."""
    done = run_helm(major, "template", RELEASE, *arguments, "--namespace", NAMESPACE)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Strict(yaml.SafeLoader):
    """Refuses a key that is there twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"twice in one mapping: {twice}{node.start_mark}"
        return super().construct_mapping(node, deep)


def objects(text: str) -> list[Object]:
    """The objects of a stream of YAML, by kind and name."""
    found = [one for one in yaml.load_all(text, _Strict) if one]
    return sorted(found, key=lambda one: (one["kind"], one["metadata"]["name"]))


def rendered(case: Case | str, major: str = "4") -> list[Object]:
    """The objects of a case."""
    return objects(rendered_text(ALL[case] if isinstance(case, str) else case, major))


def one(found: list[Object], kind: str, ending: str = "") -> Object:
    """The only object of a kind whose name ends so."""
    (match,) = [each for each in found if each["kind"] == kind and each["metadata"]["name"].endswith(ending)]
    return match


def with_values(chart: str, tmp_path: Path, values: dict[str, Any]) -> list[Object]:
    """Renders a chart with values of a test."""
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return objects(template("4", str(CHARTS / chart), "--values", str(path)))


def pod_of(found: Object) -> Object:
    """The pod that an object makes, or is."""
    return found if found["kind"] == "Pod" else found["spec"]["template"]


def pods(found: list[Object]) -> list[Object]:
    """The pods that objects make, without those that Helm makes for a test."""
    kinds = ("Pod", "DaemonSet", "StatefulSet", "Deployment", "Job")
    return [pod_of(each) for each in found if each["kind"] in kinds and not is_hook(each)]


def is_hook(found: Object) -> bool:
    """Whether Helm makes it at certain times only."""
    return "helm.sh/hook" in found["metadata"].get("annotations", {})
