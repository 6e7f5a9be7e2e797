"""Environments of client packages, apart from ours: made once and kept in a cache folder.

BLINK_TEST_CACHE names the folder (default: `blink/tests` in the user's cache). Remove it to get the newest releases of
what has no version here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

INSTALL_SECONDS = 240


def python_with(*requirements: str) -> Path:
    """An interpreter that has these packages and nothing of ours. Skips the test where it cannot be installed."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = made(f"python{version} {' '.join(requirements)}", _python_commands(requirements))
    return folder / "bin" / "python"


def node_with(requirement: str) -> Path:
    """A folder below which node finds a package. Skips the test where it cannot be installed."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    return made(f"node {requirement}", _node_commands(requirement))


def _python_commands(requirements: tuple[str, ...]) -> Callable[[Path], list[list[str]]]:
    def commands(folder: Path) -> list[list[str]]:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--python"]
        return [
            [sys.executable, "-m", "venv", "--without-pip", str(folder)],
            [*pip, str(folder / "bin" / "python"), "install", "-q", "--retries", "1", "--timeout", "10", *requirements],
        ]

    return commands


def _node_commands(requirement: str) -> Callable[[Path], list[list[str]]]:
    npm = ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=10000"]
    return lambda folder: [["mkdir", "-p", str(folder)], [*npm, "--prefix", str(folder), requirement]]


def made(what: str, commands: Callable[[Path], list[list[str]]]) -> Path:
    """The environment's folder; the file `complete` in it says that the installation came to its end."""
    folder = _cache() / hashlib.sha256(what.encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            for command in commands(folder):
                _run(what, command)
            (folder / "complete").write_text(what)
    return folder


def _run(what: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what}: not installed within {INSTALL_SECONDS} s")
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "WARN" not in line]
        pytest.skip(f"{what}: cannot be installed: {said[-1][:200] if said else 'no reason given'}")


def _cache() -> Path:
    named = os.environ.get("BLINK_TEST_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "blink" / "tests"
