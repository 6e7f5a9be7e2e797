"""The process of the chain on a CUDA device: sets it up, passes on what it is told, and waits for its end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Protocol

from blink_proto import arena
from gpu_runtime.chain.child import EXIT_DEVICE_ERROR, StoppedEarlyError, begin_child, progress_of
from gpu_runtime.chain.spec import ChainSpec
from gpu_runtime.cuda.errors import CudaError, check
from gpu_runtime.mailbox import Mailbox
from gpu_runtime.model.source import open_folder
from gpu_runtime.scheduler import layout
from gpu_runtime.shared_arena import SharedArena

_LOOK_SECONDS = 0.01
"""How often the mailbox and the chain's stream are looked at: not part of any request's way."""
_SILENT_LOOKS = 6000
"""A step takes a fraction of a second; a minute without a heartbeat is a chain that hangs."""


class Pulse:
    """Notices a chain that hangs. Counts looks rather than time, so that it does not matter whether this process was
    stopped in between."""

    def __init__(self) -> None:
        self._last, self._silent = -1, 0

    def look(self, heartbeat: int) -> bool:
        """False when the heartbeat has been the same for too many looks."""
        self._silent = self._silent + 1 if heartbeat == self._last else 0
        self._last = heartbeat
        return self._silent < _SILENT_LOOKS


class Chain(Protocol):
    """Of CudaChain, what is told to it while it runs."""

    def command(self, command: layout.Command) -> None:
        """Tells the scheduler."""

    def set_direct(self, channels: int) -> None:
        """Tells the relay."""

    def direct_seen(self) -> int:
        """What the relay has taken note of."""
        ...


class Orders:
    """Passes on what the mailbox says, and back what the device has taken note of."""

    def __init__(self, chain: Chain, mailbox: Mailbox) -> None:
        self._chain, self._mailbox = chain, mailbox
        self._command, self._direct = layout.Command.RUN, 0

    def pass_on(self) -> None:
        """Costs nothing on the bus unless something is new."""
        chain, mailbox = self._chain, self._mailbox
        if mailbox.command != self._command:
            self._command = mailbox.command
            chain.command(self._command)
        if mailbox.direct != self._direct:
            self._direct = mailbox.direct
            chain.set_direct(self._direct)
        if mailbox.direct_seen != self._direct:
            mailbox.set_direct_seen(chain.direct_seen())


def run_chain(spec: ChainSpec, mailbox: Mailbox, shared: SharedArena) -> None:
    """Sets the chain up and follows it until it ends.

    Raises:
        CudaError, RegistrationError: the device failed, or something that it needs is missing.
    """
    from cuda.bindings import driver

    from gpu_runtime.chain.cuda_chain import CudaChain
    from gpu_runtime.chain.loan import MemoryLoan

    folder = open_folder(Path(spec.model_folder), "", weights=not spec.config.random_weights)
    chain = CudaChain(folder, spec.config, spec.limits, shared, progress_of(mailbox))
    print(
        f"step graphs: {chain.graph_count}, {chain.graph_bytes / 2**20:.0f} MiB; set up in {chain.start_seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    loan = MemoryLoan(spec.memory_descriptor)
    loan.begin(chain.arena, spec.config, driver, check(driver.cuCtxGetDevice()))
    chain.start()
    mailbox.set_ready()
    orders, pulse = Orders(chain, mailbox), Pulse()
    while not chain.ended():
        if not pulse.look(int(shared.telemetry["heartbeat"][0])):
            raise CudaError(f"the chain has shown no sign of life in {_SILENT_LOOKS * _LOOK_SECONDS:.0f} s")
        orders.pass_on()
        time.sleep(_LOOK_SECONDS)
    mailbox.set_halted()
    loan.wait_end()


def main() -> int:
    """Reads a ChainSpec from standard input and runs until told to stop; returns the exit status."""
    spec, mailbox, shared = begin_child()
    try:
        run_chain(spec, mailbox, shared)
    except StoppedEarlyError:
        return 0
    except Exception as error:
        shared.telemetry["state"] = arena.DeviceState.FAILED
        print(f"device error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_DEVICE_ERROR)  # after a fault the libraries' own way out can abort
    return 0


if __name__ == "__main__":
    sys.exit(main())
