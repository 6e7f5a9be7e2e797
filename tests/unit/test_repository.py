"""Rules that hold for the whole repository."""

from __future__ import annotations

import ast
import importlib
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"dpu_service", "gpu_runtime", "proto", "deploy", "tests"}
FILES = {"pyproject.toml", "README.md", "Makefile", "LICENSE"}
PACKAGES = {"dpu_service", "gpu_runtime", "blink_proto", "blink_deploy"}

# The front end runs on a DPU, which has no GPU and no room for torch; the two programs meet in blink_proto only.
FORBIDDEN_IMPORTS = {
    "dpu_service": {"torch", "gpu_runtime", "transformers", "blink_deploy", "tests"},
    "gpu_runtime": {"dpu_service", "transformers", "blink_deploy", "tests"},
    "deploy/blink_deploy": {"torch", "transformers", "dpu_service", "gpu_runtime", "tests"},
    "proto/blink_proto": {"torch", "transformers", "dpu_service", "gpu_runtime", "blink_deploy", "tests"},
}
# Put together here, so that this file does not hold them.
FORBIDDEN_STRINGS = [
    *("/" + folder + "/" for folder in ("work", "root", "home/runner")),
    *(".".join(host) for host in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"))),
    *(".".join(host) for host in (("proxy", "golang", "org"), ("registry", "npmjs", "org"), ("anaconda", "org"))),
]


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files that git holds or would hold (not ignored)."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return tuple(path for path in paths if path.is_file())


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def imports(path: Path) -> Iterator[str]:
    """Top-level names of everything that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args and _is_import_call(node.func):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value.split(".")[0]


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("__import__", "import_module")


def test_top_level_holds_only_what_belongs_there():
    names = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    assert {name for name in names if not name.startswith(".")} == FOLDERS | FILES


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_each_folder_has_a_readme(folder: str):
    assert len((ROOT / folder / "README.md").read_text(encoding="utf-8").split()) > 20


@pytest.mark.parametrize("folder", sorted(FORBIDDEN_IMPORTS))
def test_dependencies_run_downwards(folder: str):
    sources = [path for path in python_files() if path.is_relative_to(ROOT / folder)]
    assert sources
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        for name in set(imports(path)) & FORBIDDEN_IMPORTS[folder]
    }
    assert not wrong


def test_the_import_check_sees_every_form(tmp_path: Path):
    path = tmp_path / "sample.py"
    path.write_text(
        "import a.b as c\ndef f():\n    from d.e import g\n    importlib.import_module('h.i')\nfrom . import j\n"
    )
    assert set(imports(path)) == {"a", "d", "h"}


def test_nothing_is_pickled():
    unsafe = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert not {str(path.relative_to(ROOT)) for path in python_files() if set(imports(path)) & unsafe}


def test_proto_is_only_a_folder():
    # `proto` as an import name belongs to the package proto-plus.
    assert not (ROOT / "proto" / "__init__.py").exists()
    assert not {str(path.relative_to(ROOT)) for path in python_files() if "proto" in set(imports(path))}
    top_level = metadata.distribution("blink-serving").read_text("top_level.txt")
    assert top_level is not None
    assert {name for name in top_level.split() if not name.startswith("_")} == PACKAGES


@pytest.mark.parametrize("forbidden", FORBIDDEN_STRINGS)
def test_no_file_names_a_machine_or_a_registry(forbidden: str):
    found = [path for path in tracked_files() if forbidden.encode() in path.read_bytes()]
    assert not [str(path.relative_to(ROOT)) for path in found]


def console_scripts() -> dict[str, str]:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    return {str(name): str(place) for name, place in scripts.items()}


def test_the_four_commands_exist():
    assert set(console_scripts()) == {"blink", "blinkctl", "blink-dpu", "blink-gpu"}


@pytest.mark.parametrize("name", sorted(console_scripts()))
def test_console_scripts_can_be_called(name: str):
    module, function = console_scripts()[name].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_dpu_extra_needs_no_torch():
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"dpu", "gpu", "dev"} <= optional.keys()
    assert not [requirement for requirement in optional["dpu"] if requirement.startswith(("torch", "transformers"))]
