"""Whether a process may look into another one of the same user: what `PR_SET_DUMPABLE` is for, and core files with it.

Nothing in /proc tells that attribute, but the kernel asks it before it shows `/proc/PID/exe` to somebody without
CAP_SYS_PTRACE. Where tests run as root, both sides must have given that up: nobody may look into what can do more.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable

_PR_CAPBSET_DROP = 24
_CAP_SYS_PTRACE = 19
_LOOK = """
import os, sys
for pid in sys.argv[1:]:
    try:
        os.readlink(f"/proc/{pid}/exe")
        print(pid)
    except PermissionError:
        pass
"""


def give_up_tracing() -> None:
    """For `preexec_fn`: the program, and all that it starts, will not have the capability. Others do not have it."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE, 0, 0, 0)


def open_to_others(pids: Iterable[int]) -> set[int]:
    """Those that other processes of the user may look into; all were started after `give_up_tracing`."""
    command = [sys.executable, "-c", _LOOK, *map(str, pids)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=give_up_tracing).stdout
    return {int(pid) for pid in said.split()}
