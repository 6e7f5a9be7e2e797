"""How the chain's process hands device memory of its arena to the control process: as dma-bufs, over a Unix socket.

One message (little-endian): magic "BNKM", version u8, number of regions u8, then of the inbound and of the outbound
region each u64 device address, u64 bytes of the dma-buf, u64 offset of the region in it. The dma-bufs' descriptors come
with it, in that order. The message is sent once, before the chain is ready. When the sockets' other end is closed,
the control process has let the memory go.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_runtime.registration.base import RegistrationError

PAGE = 64 << 10
"""Granularity of GPU memory in dma-bufs."""
_HEAD = struct.Struct("<4sBB")
_REGION = struct.Struct("<QQQ")
_DESCRIPTOR = struct.Struct("@i")
_MAGIC, _VERSION, _REGIONS = b"BNKM", 1, 2
_ADDRESSES = 1 << 64


@dataclass(frozen=True)
class Exported:
    """A region of the arena in device memory, `offset` bytes behind the beginning of a dma-buf."""

    descriptor: int = field(repr=False)
    address: int = field(repr=False)
    """Of the region's first byte, on the device."""
    size: int
    """Of the dma-buf, in bytes."""
    offset: int = 0

    def close(self) -> None:
        """Lets the descriptor go; what was registered through it holds the memory."""
        os.close(self.descriptor)


def send_regions(connection: socket.socket, inbound: Exported, outbound: Exported) -> None:
    """The chain's process: gives both away."""
    regions = (inbound, outbound)
    fields = [_REGION.pack(one.address, one.size, one.offset) for one in regions]
    message = _HEAD.pack(_MAGIC, _VERSION, _REGIONS) + b"".join(fields)
    socket.send_fds(connection, [message], [one.descriptor for one in regions])


def receive_regions(connection: socket.socket, needed: tuple[int, int]) -> tuple[Exported, Exported]:
    """The control process: takes both; does not wait.

    Args:
        needed: bytes of the inbound and of the outbound region.

    Raises:
        RegistrationError: no message, not one like that, or less memory than the arena needs. No descriptor is left.
    """
    length = _HEAD.size + _REGIONS * _REGION.size
    message, descriptors, whole = _receive(connection, length)
    try:
        if not whole or len(message) != length or len(descriptors) != _REGIONS:
            raise RegistrationError("the chain's process did not hand two regions of memory over")
        return _regions(message, descriptors, needed)
    except RegistrationError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _receive(connection: socket.socket, length: int) -> tuple[bytes, list[int], bool]:
    """A message, its descriptors, and whether that is all of it. CPython 3.11's `socket.recv_fds` ignores the flags."""
    room = socket.CMSG_LEN(_REGIONS * _DESCRIPTOR.size)
    try:
        message, others, seen, _ = connection.recvmsg(length + 1, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise RegistrationError(f"the chain's process handed no memory over ({error.strerror})") from error
    found: list[int] = []
    for level, kind, content in others:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = content[: len(content) // _DESCRIPTOR.size * _DESCRIPTOR.size]
            found += [descriptor for (descriptor,) in _DESCRIPTOR.iter_unpack(whole)]
    return message, found, not seen & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


def _regions(message: bytes, descriptors: Sequence[int], needed: tuple[int, int]) -> tuple[Exported, Exported]:
    if _HEAD.unpack_from(message) != (_MAGIC, _VERSION, _REGIONS):
        raise RegistrationError("the chain's process hands memory over in another form")
    inbound, outbound = (
        Exported(descriptor, *fields)
        for descriptor, fields in zip(descriptors, _REGION.iter_unpack(message[_HEAD.size :]), strict=True)
    )
    for region, least in zip((inbound, outbound), needed, strict=True):
        _check(region, least)
    return inbound, outbound


def _check(region: Exported, least: int) -> None:
    """A dma-buf tells its size by its end, as files do."""
    if region.address == 0 or region.address + region.size > _ADDRESSES:
        raise RegistrationError("the chain's process handed memory over at an impossible address")
    if region.address % PAGE or region.offset % PAGE or region.size % PAGE:
        raise RegistrationError("the chain's process handed memory over that does not lie on pages")
    if region.offset + least > region.size:
        raise RegistrationError(f"the chain's process handed {region.size} bytes over, {least} are needed")
    try:
        real = os.lseek(region.descriptor, 0, os.SEEK_END)
    except OSError as error:
        raise RegistrationError(f"the chain's process handed over what is no memory ({error.strerror})") from error
    if real < region.size:
        raise RegistrationError(f"the chain's process handed {real} bytes over and spoke of {region.size}")
