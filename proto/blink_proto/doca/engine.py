"""The progress engine: in its `progress`, and nowhere else, callbacks run."""

from __future__ import annotations

import select
from ctypes import byref, c_int

from blink_proto.doca.library import DocaLibrary


class ProgressEngine:
    """Called by one thread at a time, with the contexts on it; not always by the same one.

    DOCA's interface ties an engine to no thread. NVIDIA has one for each thread, so that no two call at once; here each
    connection has one, and both programs call it from whichever thread of a pool has the turn.
    """

    def __init__(self, library: DocaLibrary) -> None:
        self._library = library
        self._progress = library.function("doca_pe_progress")
        self.handle = library.make("doca_pe_create")
        handle = c_int()
        try:
            library.call("doca_pe_get_notification_handle", self.handle, byref(handle))
        except BaseException:
            library.function("doca_pe_destroy")(self.handle)
            raise
        self.descriptor = handle.value
        """Readable after `arm` once something has happened. The library's own: not to be read or closed."""
        self.armed = False
        """Whether the descriptor is or may become readable; `drain` has to be called then."""
        self._readable = select.poll()
        self._readable.register(self.descriptor, select.POLLIN)

    def progress(self) -> bool:
        """Takes one event, running its callback; False when there was none. Never waits."""
        return bool(self._progress(self.handle))

    def drain(self) -> int:
        """Takes all events; their number. A descriptor that is readable is cleared first, as the library asks for.

        One that is not is left armed: clearing might wait for an event on some versions, nothing says that it does not.
        """
        if self.armed and self._readable.poll(0):
            self.armed = False
            self._library.call("doca_pe_clear_notification", self.handle, self.descriptor)
        taken = 0
        while self._progress(self.handle):
            taken += 1
        return taken

    def arm(self) -> bool:
        """Lets the next event make the descriptor readable; False when events came meanwhile and were taken instead.

        To be called after `drain`. An event between the two would otherwise be slept over.
        """
        if not self.armed:
            self._library.call("doca_pe_request_notification", self.handle)
            self.armed = True
        if not self.progress():
            return True
        self.drain()
        return False

    def close(self) -> None:
        """Ends it; every context connected to it is gone before.

        Raises:
            DocaError: one is not.
        """
        self._library.call("doca_pe_destroy", self.handle)
