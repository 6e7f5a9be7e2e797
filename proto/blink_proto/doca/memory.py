"""Memory that a device may reach: local memory, with or without rights for the peer, and the peer's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

from blink_proto.doca.constants import Access
from blink_proto.doca.device import Device
from blink_proto.doca.errors import DocaError
from blink_proto.doca.library import DocaLibrary


class Place(NamedTuple):
    """Where memory begins, as its owner addresses it, and how many bytes there are."""

    address: int
    size: int


@dataclass(frozen=True)
class DmaBuf:
    """Device memory exported as a dma-buf; the descriptor may be closed once the memory is registered.

    `offset`: where the memory begins in the dma-buf.
    """

    descriptor: int
    offset: int


class Mmap:
    """A started `doca_mmap`."""

    def __init__(self, library: DocaLibrary, handle: int, device: Device) -> None:
        self._library = library
        self._device = device
        self.handle = handle

    @classmethod
    def register(
        cls, library: DocaLibrary, device: Device, place: Place, access: Access, dma_buf: DmaBuf | None = None
    ) -> Mmap:
        """Registers memory of this process, or of a GPU when it comes with a dma-buf. It must outlive the result.

        Raises:
            DocaError: the device refuses it.
        """

        def set_up(handle: int) -> None:
            if dma_buf is None:
                library.call("doca_mmap_set_memrange", handle, place.address, place.size)
            else:
                where = (dma_buf.descriptor, place.address, dma_buf.offset, place.size)
                library.call("doca_mmap_set_dmabuf_memrange", handle, *where)
            library.call("doca_mmap_set_permissions", handle, access)
            library.call("doca_mmap_add_dev", handle, device.handle)
            library.call("doca_mmap_start", handle)

        handle = library.make("doca_mmap_create")
        _or_destroy(library, handle, set_up)
        return cls(library, handle, device)

    @classmethod
    def of_peer(cls, library: DocaLibrary, device: Device, exported: bytes) -> Mmap:
        """Memory that the peer has exported. Nothing is asked of the peer: whether the key is right shows later.

        Raises:
            DocaError: the bytes are no export.
        """
        what = (None, exported, len(exported), device.handle)
        return cls(library, library.make("doca_mmap_create_from_export", *what), device)

    def place(self) -> Place:
        """The range; the peer's addresses when it is the peer's."""
        address, size = c_void_p(), c_size_t()
        self._library.call("doca_mmap_get_memrange", self.handle, byref(address), byref(size))
        return Place(address.value or 0, size.value)

    def export(self) -> bytes:
        """What the peer needs to reach the memory, its key included. A secret."""
        blob, size = c_void_p(), c_size_t()
        self._library.call("doca_mmap_export_rdma", self.handle, self._device.handle, byref(blob), byref(size))
        return ctypes.string_at(blob, size.value)

    def close(self) -> None:
        """Ends the registration: its key is worth nothing from now on.

        Raises:
            DocaError: a buffer still refers to it.
        """
        self._library.call("doca_mmap_destroy", self.handle)  # stops it; exported ones may not be stopped otherwise


def _or_destroy(library: DocaLibrary, handle: int, set_up: Callable[[int], None]) -> None:
    try:
        set_up(handle)
    except DocaError:
        library.function("doca_mmap_destroy")(handle)
        raise
