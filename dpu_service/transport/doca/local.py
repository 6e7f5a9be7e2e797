"""Memory of this process that the device reads and writes for us."""

from __future__ import annotations

import mmap

import numpy as np

from blink_proto.doca.constants import Access
from blink_proto.doca.device import Device
from blink_proto.doca.library import DocaLibrary
from blink_proto.doca.memory import Mmap, Place


class LocalBlock:
    """Page-aligned memory, registered without any right for the peer."""

    def __init__(self, library: DocaLibrary, device: Device, size: int) -> None:
        pages = mmap.mmap(-1, size)
        self._view = memoryview(pages)  # keeps them mapped
        self.place = Place(int(np.frombuffer(pages, np.uint8).ctypes.data), size)
        self.memory = Mmap.register(library, device, self.place, Access.LOCAL_READ_WRITE)

    def store(self, offset: int, payload: bytes | memoryview) -> None:
        """Copies bytes in."""
        self._view[offset : offset + len(payload)] = payload

    def load(self, offset: int, size: int) -> bytes:
        """Copies bytes out."""
        return self._view[offset : offset + size].tobytes()

    def close(self) -> None:
        """Ends the registration."""
        self.memory.close()
