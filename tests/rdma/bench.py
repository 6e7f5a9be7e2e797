"""`tests.bench.transport` in an emulated machine: `make bench-rdma`. Shared memory, and Soft-RoCE by each binding, all
in one machine with one core: its times are those of an emulator and tell nothing about an adapter.
"""

from __future__ import annotations

import sys

from tests.rdma.conftest import reason_to_skip
from tests.rdma.guest import Guest, amd64
from tests.rdma.test_one_guest import why_no_pyverbs

SECONDS = 600
SCRIPT = """\
ip addr add 10.9.0.1/24 dev dummy0 && ip link set dummy0 up && rdma link add rxe0 type rxe netdev dummy0 || exit 90
bench="$PYTHON -m tests.bench.transport --seconds 5 --note emulated"
$bench --transport shm || exit 1
for binding in {bindings}; do $bench --transport verbs --address 10.9.0.1 --binding $binding || exit 1; done
"""


def main() -> None:
    """Prints what the guest says."""
    if reason := reason_to_skip():
        sys.exit(reason)
    without = why_no_pyverbs()
    if without:
        print(f"without pyverbs: {without}")
    guest = Guest(amd64(), SCRIPT.format(bindings="ibverbs" if without else "ibverbs pyverbs"))
    try:
        status = guest.wait(SECONDS)
        print("\n".join(line for line in guest.said().splitlines() if line.startswith(("|", "shm", "verbs"))))
        sys.exit(f"the guest ended with {status}:\n{guest.said()[-3000:]}" if status else 0)
    finally:
        guest.stop()


if __name__ == "__main__":
    main()
