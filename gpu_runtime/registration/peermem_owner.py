"""The chain's process as the one that registers its memory, in domains of the control process, when that asks.

With nvidia-peermem only the process that owns device memory can register it, and only that process can give it back:
NVIDIA's driver finds what was pinned by the process that wants it unpinned. One that deregistered the memory of another
process would leave it pinned, and the module with a stale pointer to it. The kernel deregisters for whoever is last to
close the device's file. So this process holds that file from its first use on: should the control process die, it is
still this one that gives everything back, or the kernel at its end.

Sources: open-gpu-kernel-modules, `RmP2PGetInfoWithoutToken` (by `osGetCurrentProcess`), `nv_p2p_put_pages` (what is not
found counts as given back), and kernel-open/nvidia-peermem, `nv_mem_put_pages`, `nv_get_p2p_free_callback`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from blink_proto.rdma.binding import Access, RdmaError
from blink_proto.rdma.uverbs import Registered, UverbsError, UverbsFile
from gpu_runtime.registration.handover import RegionAddress
from gpu_runtime.registration.peermem_wire import REQUEST, Answer, Kind, Outcome, Request
from gpu_runtime.registration.received import receive

RIGHTS = {True: Access.LOCAL_WRITE | Access.REMOTE_WRITE, False: Access.REMOTE_READ}
"""The most that is given of the inbound region and of the outbound one."""


class DeviceFile(Protocol):
    """Of `UverbsFile`, what is used."""

    def register(self, domain: int, address: int, size: int, access: int) -> Registered:
        """Memory of this process."""

    def deregister(self, region: int) -> None:
        """Voids its keys."""


class Owner:
    """Answers requests in a thread, from `start` until the other end is closed.

    Args:
        connection: to the control process; closed at the end.
        regions: the inbound region (True) and the outbound one, where they lie in this process.
    """

    def __init__(
        self,
        connection: socket.socket,
        regions: Mapping[bool, RegionAddress],
        open_file: Callable[[int], DeviceFile] = UverbsFile,
    ) -> None:
        self._connection, self._regions, self._open_file = connection, regions, open_file
        self._file: DeviceFile | None = None
        self._descriptor = -1
        self._registered: set[int] = set()
        self._thread = threading.Thread(target=self._serve, name="peermem", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def wait_end(self, seconds: float) -> None:
        """Until the other end is closed and everything is given back, but no longer than that."""
        self._thread.join(seconds)

    def _serve(self) -> None:
        try:
            while self._answer_one():
                pass
        finally:
            self._give_all_back()
            self._connection.close()

    def _answer_one(self) -> bool:
        """False at the end."""
        try:
            received = receive(self._connection, REQUEST.size, 1)
            if not received.content:
                received.close()
                return False
            answer = self.answer(received.content if received.whole else b"", received.descriptors)
            self._connection.send(answer.to_bytes(), socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def answer(self, content: bytes, descriptors: Sequence[int]) -> Answer:
        """Does what a request wants. Its descriptors are kept or closed.

        Args:
            content: a whole message; nothing else is taken for a request.
        """
        try:
            request = Request.from_bytes(content)
        except RdmaError:
            request = None
        wanted = 1 if request is not None and request.kind is Kind.HOLD else 0
        if request is None or len(descriptors) != wanted:
            _close(descriptors)
            return Answer(Outcome.MALFORMED, 0 if request is None else request.number)
        if request.kind is Kind.HOLD:
            return Answer(self._hold(descriptors[0]), request.number)
        return self._register(request) if request.kind is Kind.REGISTER else self._deregister(request)

    def _hold(self, descriptor: int) -> Outcome:
        if self._file is None:
            try:
                self._file, self._descriptor = self._open_file(descriptor), descriptor
                return Outcome.DONE
            except RdmaError:
                pass
        _close([descriptor])
        return Outcome.REFUSED

    def _register(self, request: Request) -> Answer:
        region, access = self._regions[request.inbound], int(request.access)
        if self._file is None:
            return Answer(Outcome.UNKNOWN, request.number)
        if request.size < 1 or request.offset + request.size > region.size:
            return Answer(Outcome.OUTSIDE, request.number)
        if not access or access & ~int(RIGHTS[request.inbound]):  # ~ of a flag forgets bits without a name
            return Answer(Outcome.RIGHTS, request.number)
        if time.monotonic_ns() > request.deadline:
            return Answer(Outcome.LATE, request.number)
        try:
            where = region.address + request.offset
            made = self._file.register(request.handle, where, request.size, access)
        except UverbsError as error:
            return Answer(Outcome.REFUSED, request.number, errno=error.status)
        self._registered.add(made.handle)
        return Answer(Outcome.DONE, request.number, *made)

    def _deregister(self, request: Request) -> Answer:
        if self._file is None or request.handle not in self._registered:
            return Answer(Outcome.UNKNOWN, request.number)
        try:
            self._file.deregister(request.handle)
        except UverbsError as error:
            return Answer(Outcome.REFUSED, request.number, errno=error.status)
        self._registered.remove(request.handle)
        return Answer(Outcome.DONE, request.number)

    def _give_all_back(self) -> None:
        """What nobody asked for any more; here, and not in whichever process closes the file last."""
        if self._file is None:
            return
        for region in self._registered:
            try:
                self._file.deregister(region)
            except UverbsError:
                continue  # the kernel has taken it back already
        self._file = None
        _close([self._descriptor])


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
