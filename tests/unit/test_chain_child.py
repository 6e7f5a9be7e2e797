"""What a chain's process does beside the chain: it gives up when it is no longer wanted, and notices one that hangs."""

from __future__ import annotations

import pytest

from gpu_runtime.chain.child import StoppedEarlyError, progress_of
from gpu_runtime.chain.cuda import Pulse
from gpu_runtime.mailbox import Mailbox
from gpu_runtime.scheduler import layout

LOOKS_OF_A_MINUTE = 6000


def test_set_up_ends_when_it_is_no_longer_wanted() -> None:
    mailbox = Mailbox()
    report = progress_of(mailbox)
    report(3, 10)
    assert mailbox.progress == (3, 10)
    mailbox.command = layout.Command.STOP
    with pytest.raises(StoppedEarlyError):
        report(4, 10)
    assert mailbox.progress == (3, 10)


def test_a_chain_that_beats_is_never_given_up() -> None:
    pulse = Pulse()
    assert all(pulse.look(beat // (LOOKS_OF_A_MINUTE - 1)) for beat in range(5 * LOOKS_OF_A_MINUTE))


def test_a_chain_that_hangs_is_given_up_after_a_minute_of_looks() -> None:
    pulse = Pulse()
    looks = [pulse.look(7) for _ in range(LOOKS_OF_A_MINUTE + 1)]
    assert looks == [True] * LOOKS_OF_A_MINUTE + [False]
