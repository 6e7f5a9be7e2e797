"""Messages over a Unix socket, with the descriptors that come with them."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field

_DESCRIPTOR = struct.Struct("@i")


@dataclass(frozen=True)
class Received:
    """A message. `whole`: that is all of it, and of its descriptors; an empty one is the end."""

    content: bytes = field(repr=False)
    descriptors: list[int] = field(repr=False)
    whole: bool

    def close(self) -> None:
        """Lets its descriptors go."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def receive(connection: socket.socket, length: int, descriptors: int, flags: int = 0) -> Received:
    """The next message. CPython 3.11's `socket.recv_fds` ignores the flags.

    Args:
        length, descriptors: the most that is taken.

    Raises:
        OSError: there is none.
    """
    room = socket.CMSG_LEN(descriptors * _DESCRIPTOR.size) if descriptors else 0
    content, others, seen, _ = connection.recvmsg(length + 1, room, flags | socket.MSG_CMSG_CLOEXEC)
    found: list[int] = []
    for level, kind, data in others:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = data[: len(data) // _DESCRIPTOR.size * _DESCRIPTOR.size]
            found += [descriptor for (descriptor,) in _DESCRIPTOR.iter_unpack(whole)]
    lost = seen & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    return Received(content, found, not lost and len(content) <= length)
