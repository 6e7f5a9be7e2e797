"""One page between the control process and the chain, private to the runtime (see `scheduler/layout.toml`)."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.scheduler import layout


class Mailbox:
    """The page, in anonymous memory whose descriptor is handed to the chain's process."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("blink-mailbox") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._words = np.frombuffer(self._page, dtype=np.uint64)

    @property
    def command_word(self) -> NDArray[np.uint64]:
        """uint64 [1]: the word that the chain polls."""
        return self._word("command")

    @property
    def command(self) -> layout.Command:
        """What the control process wants."""
        return layout.Command(int(self.command_word[0]))

    @command.setter
    def command(self, command: layout.Command) -> None:
        self.command_word[0] = int(command)

    @property
    def ready(self) -> bool:
        """The chain is warm and takes submissions."""
        return bool(self._word("ready")[0])

    def set_ready(self) -> None:
        """Written by the chain."""
        self._word("ready")[0] = 1

    @property
    def progress(self) -> tuple[int, int]:
        """(done, total) units of the chain's start-up."""
        return int(self._word("progress_done")[0]), int(self._word("progress_total")[0])

    def set_progress(self, done: int, total: int) -> None:
        """Written by the chain."""
        self._word("progress_total")[0] = total
        self._word("progress_done")[0] = done

    @property
    def direct(self) -> int:
        """A bit for each channel that the relay of a CUDA device has to leave alone (see layout.ChainBoard)."""
        return int(self._word("direct")[0])

    @direct.setter
    def direct(self, channels: int) -> None:
        self._word("direct")[0] = channels

    @property
    def direct_seen(self) -> int:
        """Which ones it leaves alone."""
        return int(self._word("direct_seen")[0])

    def set_direct_seen(self, channels: int) -> None:
        """Written by the chain."""
        self._word("direct_seen")[0] = channels

    @property
    def halted(self) -> bool:
        """Nothing runs on the CUDA device any more; its memory is given up when the control process has let it go."""
        return bool(self._word("halted")[0])

    def set_halted(self) -> None:
        """Written by the chain."""
        self._word("halted")[0] = 1

    def _word(self, field: str) -> NDArray[np.uint64]:
        at = layout.MAILBOX_OFFSETS[field] // 8
        return self._words[at : at + 1]
