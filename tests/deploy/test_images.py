"""Dockerfiles by their linter and by rules of ours, and the lock files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.charts import DEPLOY, ROOT
from tests.deploy.tools import hadolint
from tests.ecosystem.environments import python_with

IMAGES = DEPLOY / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
EVERY = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
EXTRAS = {"dpu": ("dpu", "rdma"), "gpu": ("dpu", "gpu", "cuda", "rdma")}
MARKERS = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.12", "extra": ""}


BUILDS = pytest.mark.skipif(
    "BLINK_TEST_IMAGES" not in os.environ, reason="BLINK_TEST_IMAGES is not set: it downloads and builds for minutes"
)


def instructions(path: Path) -> list[str]:
    """Whole instructions, without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def stages(path: Path) -> list[list[str]]:
    found: list[list[str]] = []
    for line in instructions(path):
        if line.startswith("FROM "):
            found.append([])
        if found:
            found[-1].append(line)
    return found


def test_the_linter_finds_nothing() -> None:
    done = subprocess.run(
        [str(hadolint("2.15.1")), "--no-color", *map(str, DOCKERFILES)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@EVERY
def test_bases_are_named_by_version_and_digest(path: Path) -> None:
    (base,) = [line for line in instructions(path) if line.startswith("ARG BASE=")]
    assert re.search(r":\d+\.\d+\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$", base)
    assert all(re.match(r"FROM \$\{BASE\}( AS build)?$", stage[0]) for stage in stages(path))


@EVERY
def test_the_last_stage_has_no_compiler_and_no_root(path: Path) -> None:
    *_, last = stages(path)
    assert len(stages(path)) == 2
    text = "\n".join(last)
    assert not re.search(r"\b(gcc|g\+\+|clang|make|cmake|build-essential|\S+-dev|pip|curl|git)\b", text), text
    users = [line for line in last if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]
    assert last.index(users[0]) > max(i for i, line in enumerate(last) if line.startswith("RUN "))
    assert any("pip uninstall -y pip" in line for line in stages(path)[0])


@EVERY
def test_what_is_installed_is_locked(path: Path) -> None:
    for line in instructions(path):
        for command in re.findall(r"pip install ([^&]*)", line):
            assert "--require-hashes" in command or "--no-index" in command, command


@EVERY
def test_what_is_copied_is_there_and_not_left_out(path: Path) -> None:
    kept = (path.parent / f"{path.name}.dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in kept if line.startswith("!")]
    for line in instructions(path):
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == name or source.startswith(f"{name}/") for name in allowed), source


@EVERY
def test_the_user_is_the_charts(path: Path) -> None:
    assert "10001:10001" in path.read_text()
    for chart in ("blink-gpu/templates/statefulset.yaml", "blink-dpu/templates/daemonset.yaml"):
        assert "ternary 0 10001 $asRoot" in (DEPLOY / "charts" / chart).read_text()


@BUILDS
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("image", ["dpu", "gpu"])
def test_images_can_be_built(image: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every step of the Dockerfile, on another base. As root, with Debian's buildah, crun and debootstrap."""
    folder = os.environ["BLINK_TEST_IMAGES"] or str(tmp_path_factory.getbasetemp() / "images")
    done = subprocess.run([IMAGES / "rehearse", image, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith(f"blink-{image}: built and looked at\n")


@BUILDS
def test_the_front_ends_packages_are_there_for_arm(tmp_path: Path) -> None:
    """Wheels, with the hashes of the lock file: nothing but this project is compiled on the DPU's architecture."""
    platforms = [f"--platform=manylinux{name}_aarch64" for name in ("_2_17", "2014", "_2_27", "_2_28")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps"]
    command += [*platforms, "--python-version=3.12", "--only-binary=:all:", "--require-hashes"]
    command += ["--target", str(tmp_path / "nothing"), "-r", str(IMAGES / "dpu.lock"), "--report", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {canonicalize_name(one["metadata"]["name"]) for one in json.loads(done.stdout)["install"]}
    assert found == set(locked("dpu"))


def locked(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", (IMAGES / f"{name}.lock").read_text(), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


@pytest.mark.parametrize("name", EXTRAS)
def test_locks_hold_what_the_project_needs(name: str) -> None:
    """deploy/images/lock writes them anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(each for extra in EXTRAS[name] for each in extras[extra])]
    versions = locked(name)
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(MARKERS):
            version = versions.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not in {name}.lock"
            assert requirement.specifier.contains(version, prereleases=True), text


@pytest.mark.parametrize("name", EXTRAS)
def test_a_bill_of_materials_names_every_package(name: str) -> None:
    python = python_with("cyclonedx-bom==7.5.0")
    command = [str(python), "-m", "cyclonedx_py", "requirements", str(IMAGES / f"{name}.lock")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert bill["bomFormat"] == "CycloneDX"
    assert {canonicalize_name(each["name"]): each["version"] for each in bill["components"]} == locked(name)


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.lock")), ids=lambda path: path.name)
def test_locks_have_hashes_and_no_addresses(path: Path) -> None:
    text = path.read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert "://" not in text
    assert "--index" not in text


def test_a_gpu_image_needs_no_compiler(tmp_path: Path) -> None:
    """Triton calls the compiler for one file of its own; what was made of it beforehand is given out instead."""
    if find_spec("triton") is None or shutil.which("gcc") is None:
        pytest.skip("triton or gcc is not installed")
    from triton.runtime import build

    made = subprocess.run(
        [IMAGES / "prebuild-triton", sys.executable, tmp_path / "made"], capture_output=True, text=True, check=True
    )
    source = Path(build.__file__).parent.parent / "backends" / "nvidia" / "driver.c"
    environment = {**os.environ, "BLINK_PREBUILT": str(tmp_path / "made"), "CC": str(IMAGES / "prebuilt-cc")}
    call = "build._build('cuda_utils', *sys.argv[1:3], [], [], ['libcuda.so.1'], [])"
    script = f"import sys; from triton.runtime import build; print({call})"
    command = [sys.executable, "-c", script, str(source), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == Path(made.stdout.strip()).read_bytes()
    other = tmp_path / "other.c"
    other.write_text("int other;")
    done = subprocess.run(
        [*command[:3], str(other), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert "has no compiler" in done.stderr
