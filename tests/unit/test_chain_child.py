"""What a chain's process does beside the chain: it gives up when it is no longer wanted, and notices one that hangs."""

from __future__ import annotations

import pytest

from gpu_runtime.chain.child import StoppedEarlyError, progress_of
from gpu_runtime.chain.cuda import Orders, Pulse
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


class Device:
    """A chain that takes note of what it is told one look later, and counts what goes over the bus."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.direct = self.seen = self.looks = 0

    def command(self, command: layout.Command) -> None:
        self.told.append(int(command))

    def set_direct(self, channels: int) -> None:
        self.told.append(channels)
        self.direct = channels

    def direct_seen(self) -> int:
        self.looks += 1
        seen, self.seen = self.seen, self.direct
        return seen


def test_orders_are_passed_on_once_and_what_was_noted_comes_back() -> None:
    device, mailbox = Device(), Mailbox()
    orders = Orders(device, mailbox)
    for _ in range(3):
        orders.pass_on()
    assert (device.told, device.looks) == ([], 0)
    mailbox.direct, mailbox.command = 0b101, layout.Command.DRAIN
    orders.pass_on()
    assert (device.told, mailbox.direct_seen) == ([int(layout.Command.DRAIN), 0b101], 0)
    for _ in range(3):
        orders.pass_on()
    assert (len(device.told), device.looks, mailbox.direct_seen) == (2, 2, 0b101)
    mailbox.direct = (1 << 64) - 1  # as many channels as there can be
    for _ in range(3):
        orders.pass_on()
    assert mailbox.direct_seen == (1 << 64) - 1
