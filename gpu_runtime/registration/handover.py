"""How the chain's process hands device memory of its arena to the control process, over a Unix socket.

One message (little-endian): magic "BNKM", version u8, way u8 (1: dma-bufs, 2: nvidia-peermem), number of regions u8,
then of the inbound and of the outbound region each u64 device address, u64 bytes of the dma-buf or of the region, u64
offset of the region in its dma-buf. The dma-bufs' descriptors come with it, in that order; with nvidia-peermem there
are none, and requests follow (`peermem_wire`). The message is sent once, before the chain is ready. When the sockets'
other end is closed, the control process has let the memory go.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field

from gpu_runtime.registration.base import RegistrationError
from gpu_runtime.registration.received import Received, receive

PAGE = 64 << 10
"""Granularity of GPU memory in dma-bufs, and of what nvidia-peermem pins."""
_HEAD = struct.Struct("<4sBBB")
_REGION = struct.Struct("<QQQ")
_MAGIC, _VERSION, _REGIONS = b"BNKM", 2, 2
_DMA_BUFS, _PEERMEM = 1, 2
_ADDRESSES = 1 << 64


@dataclass(frozen=True)
class RegionAddress:
    """Device memory of one of the arena's regions, in whole pages."""

    address: int = field(repr=False)
    size: int


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


Lent = tuple[Exported, Exported] | tuple[RegionAddress, RegionAddress]
"""The inbound and the outbound region, by dma-bufs or for nvidia-peermem."""


def send_regions(connection: socket.socket, inbound: Exported, outbound: Exported) -> None:
    """The chain's process: gives both away."""
    regions = (inbound, outbound)
    fields = [_REGION.pack(one.address, one.size, one.offset) for one in regions]
    message = _HEAD.pack(_MAGIC, _VERSION, _DMA_BUFS, _REGIONS) + b"".join(fields)
    socket.send_fds(connection, [message], [one.descriptor for one in regions])


def send_addresses(connection: socket.socket, inbound: RegionAddress, outbound: RegionAddress) -> None:
    """The chain's process: says where both are, and that it registers them itself."""
    fields = [_REGION.pack(one.address, one.size, 0) for one in (inbound, outbound)]
    connection.send(_HEAD.pack(_MAGIC, _VERSION, _PEERMEM, _REGIONS) + b"".join(fields))


def receive_regions(connection: socket.socket, needed: tuple[int, int]) -> Lent:
    """The control process: takes both; does not wait.

    Args:
        needed: bytes of the inbound and of the outbound region.

    Raises:
        RegistrationError: no message, not one like that, or less memory than the arena needs. No descriptor is left.
    """
    try:
        received = receive(connection, _HEAD.size + _REGIONS * _REGION.size, _REGIONS, socket.MSG_DONTWAIT)
    except OSError as error:
        raise RegistrationError(f"the chain's process handed no memory over ({error.strerror})") from error
    try:
        return _regions(received, needed)
    except RegistrationError:
        received.close()
        raise


def _regions(received: Received, needed: tuple[int, int]) -> Lent:
    if not received.whole or len(received.content) != _HEAD.size + _REGIONS * _REGION.size:
        raise RegistrationError("the chain's process did not hand two regions of memory over")
    magic, version, way, count = _HEAD.unpack_from(received.content)
    if (magic, version, count) != (_MAGIC, _VERSION, _REGIONS) or way not in (_DMA_BUFS, _PEERMEM):
        raise RegistrationError("the chain's process hands memory over in another form")
    if len(received.descriptors) != (_REGIONS if way == _DMA_BUFS else 0):
        raise RegistrationError("the chain's process did not hand two regions of memory over")
    inbound, outbound = (fields for fields in _REGION.iter_unpack(received.content[_HEAD.size :]))
    for fields, least in zip((inbound, outbound), needed, strict=True):
        _check(fields, least)
    if way == _PEERMEM:
        return RegionAddress(*inbound[:2]), RegionAddress(*outbound[:2])
    exported = (Exported(received.descriptors[0], *inbound), Exported(received.descriptors[1], *outbound))
    for one in exported:
        _check_real(one)
    return exported


def _check(fields: tuple[int, ...], least: int) -> None:
    address, size, offset = fields
    if address == 0 or address + size > _ADDRESSES:
        raise RegistrationError("the chain's process handed memory over at an impossible address")
    if address % PAGE or offset % PAGE or size % PAGE:
        raise RegistrationError("the chain's process handed memory over that does not lie on pages")
    if offset + least > size:
        raise RegistrationError(f"the chain's process handed {size} bytes over, {least} are needed")


def _check_real(region: Exported) -> None:
    """A dma-buf tells its size by its end, as files do."""
    try:
        real = os.lseek(region.descriptor, 0, os.SEEK_END)
    except OSError as error:
        raise RegistrationError(f"the chain's process handed over what is no memory ({error.strerror})") from error
    if real < region.size:
        raise RegistrationError(f"the chain's process handed {real} bytes over and spoke of {region.size}")
