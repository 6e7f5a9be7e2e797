"""Buffers: what a task reads from and writes to."""

from __future__ import annotations

from ctypes import c_uint16

from blink_proto.doca.errors import DocaError
from blink_proto.doca.library import DocaLibrary
from blink_proto.doca.memory import Mmap, Place


class Buffer:
    """A `doca_buf` over a whole range, aimed at a part of it before each use."""

    def __init__(self, library: DocaLibrary, handle: int, place: Place) -> None:
        self._set_data = library.function("doca_buf_set_data")
        self.handle = handle
        self.place = place

    def aim_source(self, offset: int, size: int) -> None:
        """The next task takes these bytes."""
        self._set_data(self.handle, self.place.address + offset, size)

    def aim_target(self, offset: int) -> None:
        """The next task puts its bytes behind these: a task appends to what a buffer holds, so it must hold nothing."""
        self._set_data(self.handle, self.place.address + offset, 0)


class BufferInventory:
    """Where buffers come from.

    Args:
        count: buffers at most.
    """

    def __init__(self, library: DocaLibrary, count: int) -> None:
        self._library = library
        self._buffers: list[Buffer] = []
        self.handle = library.make("doca_buf_inventory_create", count)
        try:
            library.call("doca_buf_inventory_start", self.handle)
        except DocaError:
            library.function("doca_buf_inventory_destroy")(self.handle)
            raise

    def buffer(self, memory: Mmap, place: Place) -> Buffer:
        """A buffer over `place`, which lies in `memory`.

        Raises:
            DocaError: it does not, or there are too many buffers.
        """
        at = (place.address, place.size, place.address, 0)
        made = Buffer(
            self._library,
            self._library.make("doca_buf_inventory_buf_get_by_args", self.handle, memory.handle, *at),
            place,
        )
        self._buffers.append(made)
        return made

    def close(self) -> None:
        """Gives all buffers back. No task uses one any more."""
        while self._buffers:
            self._library.call("doca_buf_dec_refcount", self._buffers.pop().handle, c_uint16())
        self._library.call("doca_buf_inventory_stop", self.handle)
        self._library.call("doca_buf_inventory_destroy", self.handle)
