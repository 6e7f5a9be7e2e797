"""A chain in a process of its own, to be stopped by tests: `python -m tests.gpu.chain_process`.

Reads one line of JSON (model folder, device, choices of `make_config`), says in one line where the arena is once the
chain runs, and ends when its standard input ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_runtime.config import make_config
from gpu_runtime.shared_arena import ArenaName, SharedArena
from tests.bench.gpu.chains import local_chain
from tests.bench.gpu.front import Front


@dataclass(frozen=True)
class Started:
    """The process, and a front end of ours in its arena."""

    process: subprocess.Popen[str]
    front: Front


@contextmanager
def chain_process(folder: Path, device: str, **choices: Any) -> Iterator[Started]:
    """Starts the process and takes a channel; kills it in the end if it does not end by itself."""
    command = [sys.executable, "-m", "tests.gpu.chain_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"folder": str(folder), "device": device, "choices": choices}) + "\n")
        process.stdin.flush()
        said = next((line for line in process.stdout if line.startswith("{")), "")
        assert said, f"the chain's process ended with status {process.wait(20)}"
        sizes = make_config(device, **choices).arena_sizes()
        front = Front(SharedArena.attach(ArenaName(**json.loads(said)), sizes), over=lambda: process.poll() is not None)
        front.take()
        yield Started(process, front)
        process.stdin.close()
        process.wait(20)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """See the module."""
    asked = json.loads(sys.stdin.readline())
    with local_chain(Path(asked["folder"]), asked["device"], **asked["choices"]) as chain:
        print(json.dumps(asdict(chain.shared.name)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
