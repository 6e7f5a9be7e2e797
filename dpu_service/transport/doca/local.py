"""Memory of this process that the device reads and writes for us."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from blink_proto.doca.constants import Access
from blink_proto.doca.device import Device
from blink_proto.doca.library import DocaLibrary
from blink_proto.doca.memory import Mmap, Place


class LocalBlock:
    """Page-aligned memory, registered without any right for the peer."""

    def __init__(self, library: DocaLibrary, device: Device, size: int) -> None:
        self._view = np.frombuffer(mmap.mmap(-1, size), np.uint8)  # keeps the memory mapped
        self.place = Place(int(self._view.ctypes.data), size)
        self.memory = Mmap.register(library, device, self.place, Access.LOCAL_READ_WRITE)

    def store(self, offset: int, payload: bytes | memoryview) -> None:
        """Copies bytes in."""
        self._view[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)

    def load(self, offset: int, size: int) -> bytes:
        """Copies bytes out."""
        return ctypes.string_at(self.place.address + offset, size)

    def close(self) -> None:
        """Ends the registration."""
        self.memory.close()
