"""The process of a chain that computes nothing: `python -m tests.standin.idle`, started as the real one is."""

from __future__ import annotations

import os
import sys
import time

from blink_proto import arena
from gpu_runtime.chain.child import begin_child
from gpu_runtime.scheduler import layout

NEVER_READY = "BLINK_STANDIN_NEVER_READY"


def main() -> None:
    _, mailbox, shared = begin_child()
    if NEVER_READY not in os.environ:
        mailbox.set_ready()
    while (command := mailbox.command) != layout.Command.STOP:
        if command == layout.Command.DRAIN:
            shared.telemetry["state"] = arena.DeviceState.DRAINING
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
