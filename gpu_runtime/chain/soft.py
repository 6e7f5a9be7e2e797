"""The soft GPU: the chain as a process of its own, with torch on the CPU for the layers.

It stands where the GPU stands: started by the control process, then on its own. It shares with the real thing the
arena, the scheduler core and the step buckets.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.chain.child import EXIT_DEVICE_ERROR, StoppedEarlyError, begin_child, progress_of
from gpu_runtime.config import scheduler_config
from gpu_runtime.mailbox import Mailbox
from gpu_runtime.model.source import open_folder
from gpu_runtime.scheduler.host import HostScheduler, Plan

IDLE_POLL_NS = 50_000_000
"""Longest wait in one poll: leases are checked, and the heartbeat grows, at least that often."""


class StepRunner(Protocol):
    """Computes a planned step."""

    def run(self, plan: Plan) -> NDArray[np.int32]:
        """The sampled token of each row of the plan, int32 [rows]; fills the plan's `logprobs` where rows want it."""
        ...


def run_chain(scheduler: HostScheduler, runner: StepRunner, mailbox: Mailbox) -> None:
    """Step after step until the mailbox says stop. Touches nothing of the control process but the mailbox."""
    sampled = np.empty(0, np.int32)
    while True:
        command = mailbox.command
        plan = scheduler.step(sampled, time.monotonic_ns(), command)
        if plan.stopped:
            return
        if plan.tokens:
            sampled = runner.run(plan)
        else:
            sampled = np.empty(0, np.int32)
            scheduler.poll(IDLE_POLL_NS, mailbox.command_word, int(command))


def main() -> int:
    """Reads a ChainSpec from standard input and runs until told to stop; returns the exit status."""
    spec, mailbox, shared = begin_child()
    config = scheduler_config(spec.config, spec.limits)
    report = progress_of(mailbox)
    try:
        folder = open_folder(Path(spec.model_folder), "")
        units = len(folder.tensors.file_of) + int(config["bucket_count"])
        report(0, units)  # torch, which comes next, takes seconds
        from gpu_runtime.chain.soft_step import SoftStep

        runner = SoftStep(folder, spec.config.threads, config, lambda done: report(done, units))
        scheduler = HostScheduler(config, shared.inbound, shared.outbound)
        mailbox.set_ready()
        run_chain(scheduler, runner, mailbox)
    except StoppedEarlyError:
        return 0
    except Exception as error:
        shared.telemetry["state"] = arena.DeviceState.FAILED
        print(f"device error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_DEVICE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
