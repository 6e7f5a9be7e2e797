"""Care for what must not be seen: session nonces, transport blobs, and the memory of the processes that hold them."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

_PR_SET_DUMPABLE = 4
KEEP_DUMPS = "BLINK_CORE_DUMPS"


class SecretBytes(bytes):
    """Bytes that print as a word. Slices and copies are plain bytes."""

    def __repr__(self) -> str:
        return "SecretBytes(redacted)"

    __str__ = __repr__

    def __format__(self, specification: str) -> str:
        return repr(self)


class SecretInt(int):
    """A number that prints as a word."""

    def __repr__(self) -> str:
        return "SecretInt(redacted)"

    __str__ = __repr__

    def __format__(self, specification: str) -> str:
        return repr(self)


def forbid_core_dumps() -> None:
    """No core file of this process, and no look into its memory for other processes of the same user (Linux).

    Both settings are needed: a core pattern that is a pipe ignores the limit. `BLINK_CORE_DUMPS=1` leaves everything as
    it is, for whoever debugs.
    """
    if os.environ.get(KEEP_DUMPS) == "1":
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
