"""Random histories on the scheduler's GPU build in a process of its own, for tools that watch kernels:
`python -m tests.gpu.device_histories LIBRARY COUNT`."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_runtime.scheduler import host
from tests.property.test_histories import run_history


def main() -> None:
    """Status 0 when all agree with the twin."""
    library, count = Path(sys.argv[1]), int(sys.argv[2])
    host.use_library(library)
    for seed in range(count):
        run_history(seed)
    print(f"{count} histories agree with the twin")


if __name__ == "__main__":
    main()
