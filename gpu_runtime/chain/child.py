"""How a chain's process begins, whatever its device."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from blink_proto.secret import forbid_core_dumps
from gpu_runtime.chain.spec import ChainSpec
from gpu_runtime.mailbox import Mailbox
from gpu_runtime.scheduler import layout
from gpu_runtime.shared_arena import SharedArena

EXIT_DEVICE_ERROR = 70


class StoppedEarlyError(Exception):
    """The control process wants the chain to stop before it has begun."""


_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def begin_child() -> tuple[ChainSpec, Mailbox, SharedArena]:
    """Reads the ChainSpec from standard input and attaches to what it names."""
    forbid_core_dumps()
    spec = ChainSpec.from_json(sys.stdin.buffer.readline())
    _leave_with_parent(int(sys.argv[1]))
    _ignore_terminal_signals()
    sleep_exactly()
    return spec, Mailbox(spec.mailbox_descriptor), SharedArena.attach(spec.arena_name, spec.sizes)


def progress_of(mailbox: Mailbox) -> Callable[[int, int], None]:
    """Reports (done, total) of the set-up, and ends it by StoppedEarlyError when it is no longer wanted."""

    def report(done: int, total: int) -> None:
        if mailbox.command == layout.Command.STOP:
            raise StoppedEarlyError
        mailbox.set_progress(done, total)

    return report


def sleep_exactly() -> None:
    """Linux makes sleeps 50 µs longer than asked for, unless told otherwise; an idle soft GPU looks every 20."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)


def _leave_with_parent(parent: int) -> None:
    """The chain ends with its control process, as a GPU's work ends with the process that owns it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the control process is gone")


def _ignore_terminal_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
