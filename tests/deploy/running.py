"""Runs the containers of rendered pods as processes of this machine: arguments, environment and probes as they are, and
mounts as folders.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.deploy.charts import Object

START_SECONDS = 120
MODULES = {
    "blink": "blink_deploy.main",
    "blinkctl": "blink_deploy.ctl",
    "blink-dpu": "dpu_service.main",
    "blink-gpu": "gpu_runtime.main",
}


@dataclass
class Running:
    """A container and its process."""

    container: Object
    root: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")

    def probe(self, name: str) -> bool:
        """What the kubelet would see."""
        probe = self.container[name]
        if "exec" in probe:
            command = _command(self.container, self.root, probe["exec"]["command"])
            return subprocess.run(command, capture_output=True, check=False, env=_environment({})).returncode == 0
        call = probe["httpGet"]
        port = {port["name"]: port["containerPort"] for port in self.container["ports"]}[call["port"]]
        url = f"{call['scheme'].lower()}://127.0.0.1:{port}{call['path']}"
        try:
            return httpx.get(url, verify=False, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self, pause: float = 0.1) -> None:
        """Until the readiness probe succeeds."""
        deadline = time.monotonic() + START_SECONDS
        while not self.probe("readinessProbe"):
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(pause)

    def stop(self, seconds: float) -> int:
        """Asks as the kubelet does; the status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()


def mounts(container: Object, root: Path) -> dict[str, Path]:
    """The folder of each mount."""
    return {mount["mountPath"]: root / mount["name"] for mount in container["volumeMounts"]}


def start(container: Object, root: Path, more: Sequence[str] = (), without: Sequence[str] = ()) -> Running:
    """Starts a container's program.

    Args:
        more: arguments that only a test needs.
        without: options to leave out, each with its value.
    """
    for folder in mounts(container, root).values():
        folder.mkdir(parents=True, exist_ok=True)
    words = [*container["command"], *container["args"]]
    for option in without:
        at = words.index(option)
        words = words[:at] + words[at + 2 :]
    values = {entry["name"]: entry.get("value", "node-1") for entry in container["env"]}
    words = [re.sub(r"\$\((\w+)\)", lambda match: values[match.group(1)], word) for word in words]
    named = {name: _inside(value, container, root) for name, value in values.items()}
    with (root / "log").open("wb") as output:
        command = [*_command(container, root, words), *more]
        process = subprocess.Popen(command, env=_environment(named), stdout=output, stderr=output, cwd=root)
    return Running(container, root, process)


def _command(container: Object, root: Path, words: Sequence[str]) -> list[str]:
    program, *rest = words
    return [sys.executable, "-m", MODULES[program], *(_inside(word, container, root) for word in rest)]


def _inside(word: str, container: Object, root: Path) -> str:
    for place, folder in mounts(container, root).items():
        if word == place or word.startswith(f"{place}/"):
            return str(folder) + word.removeprefix(place)
    return word


def _environment(named: dict[str, str]) -> dict[str, str]:
    kept = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
    return {**{name: os.environ[name] for name in kept if name in os.environ}, **named}
