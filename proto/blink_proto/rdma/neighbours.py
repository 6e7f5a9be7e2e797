"""Makes the kernel learn a peer's hardware address.

Connecting a RoCE queue pair asks for it and, where it is not known, waits up to a second. Both packages keep the
interpreter lock meanwhile, which stops all threads of the process; so it is asked for beforehand.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from pathlib import Path

from blink_proto.rdma.binding import RdmaError

ROCE_PORT = 4791
SECONDS = 1.5
"""For two of the kernel's questions, which it asks a second apart."""
_SLICE_MS = 20
_ARP = Path("/proc/net/arp")
_COMPLETE = 2
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


def wake_neighbour(own: str, peer: str, seconds: float = SECONDS) -> None:
    """Returns when the way to `peer` is known, or nobody can tell, as behind a router whose firewall lets no answer
    through, or over IPv6: the kernel then finds out by itself, or refuses.

    A TCP connection to the port that RoCE has for UDP is begun; its refusal is as good as its success.

    Raises:
        RdmaError: nobody has that address.
    """
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setblocking(False)
        try:
            attempt.bind((own, 0))
            status = attempt.connect_ex((peer, ROCE_PORT))
        except OSError as error:
            raise RdmaError(f"there is no way to the peer ({error.strerror})") from None
        end = time.monotonic() + seconds
        poller = select.poll()
        poller.register(attempt, select.POLLOUT)
        while status == errno.EINPROGRESS and _answered(peer) is not True and time.monotonic() < end:
            if poller.poll(_SLICE_MS):
                status = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if status in _UNREACHABLE or (status == errno.EINPROGRESS and _answered(peer) is False):
        raise RdmaError("nobody has the peer's address")


def _answered(peer: str) -> bool | None:
    """Whether a neighbour has told its hardware address, by the kernel's table of IPv4 neighbours; None where the peer
    is not in there."""
    try:
        rows = [line.split() for line in _ARP.read_text().splitlines()[1:]]
    except OSError:
        return None
    flags = [int(row[2], 16) for row in rows if len(row) > 2 and row[0] == peer]
    return any(one & _COMPLETE for one in flags) if flags else None
