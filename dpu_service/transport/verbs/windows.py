"""Where in remote memory the parts of a region lie."""

from __future__ import annotations

from collections.abc import Sequence

from blink_proto.rdma.wire import Window
from dpu_service.transport.base import TransportError

_WORD = 8


class Windows:
    """The windows of one region."""

    def __init__(self, windows: Sequence[Window], region_bytes: int) -> None:
        if any(one.offset + one.size > region_bytes for one in windows):
            raise TransportError("the runtime's answer names memory outside of the arena")
        self._windows = tuple(windows)

    def find(self, offset: int, size: int, *, aligned: bool = False) -> tuple[int, int]:
        """Remote address and key of a range.

        Raises:
            TransportError: it lies in no window, or `aligned` and it is not made of whole words.
        """
        if size < 0 or (aligned and (offset % _WORD or size % _WORD)):
            raise TransportError(f"{size} bytes at {offset} are not whole words")
        for window in self._windows:
            if window.covers(offset, size):
                return window.address + offset - window.offset, window.key
        raise TransportError(f"{size} bytes at {offset} do not lie within the memory of this session")
