"""The runtimes that `blink up` starts, each on a device of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import typer

from blink_deploy.programs import Program

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Runtime:
    """One of them.

    Attributes:
        control: address of its control plane.
        arguments: what else it is called with.
        environment: what it sees differently from this process.
    """

    control: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, name: str) -> Program:
        """Its process."""
        return Program.start(name, "gpu_runtime.main", ["--listen", self.control, *self.arguments], self.environment)


def share_of_cores(kind: str, count: int) -> list[str]:
    """Options by which several soft GPUs do not each take all cores; blink-gpu's last word counts."""
    if kind != "cpu" or count == 1:
        return []
    return ["--threads", str(max(1, (os.cpu_count() or 1) // count))]


def device_of(kind: str, number: int, count: int) -> dict[str, str]:
    """What makes a runtime see its own CUDA device only: of those that this process may see, the one with this number.

    Raises:
        typer.BadParameter: this process may see fewer.
    """
    if kind != "cuda" or count == 1:
        return {}
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return {VISIBLE: str(number)}
    devices = [one.strip() for one in visible.split(",") if one.strip()]
    if number >= len(devices):
        raise typer.BadParameter(f"--gpus {count} asks for more devices than {VISIBLE}={visible} has")
    return {VISIBLE: devices[number]}
