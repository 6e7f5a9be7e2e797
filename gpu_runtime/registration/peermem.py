"""The arena in a CUDA device's memory where only its owner, the chain's process, can register it (nvidia-peermem).

Sessions belong to this process, the control process, and so do their protection domains. Each part is registered by the
chain's process at the request of this one, and given back the same way; see `peermem_owner` for why. While the chain's
process does not answer, nothing is registered, and what is to be given back remains: whoever revokes has to take away
the connection instead. When that process is gone, so is its hold on the memory, and this one deregisters by itself.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blink_proto.rdma.binding import Access, RdmaError, Shared
from blink_proto.rdma.uverbs import UverbsError, UverbsFile
from blink_proto.secret import SecretInt
from gpu_runtime.registration.handover import RegionAddress
from gpu_runtime.registration.parts import Domain, Part, Region
from gpu_runtime.registration.peermem_owner import DeviceFile
from gpu_runtime.registration.peermem_wire import ANSWER, WORDS, Answer, Kind, Outcome, Request
from gpu_runtime.registration.received import receive

ANSWER_SECONDS = 2.0
"""Pinning takes milliseconds. Nobody else is let in meanwhile."""
_TO_BEGIN_SECONDS = 1.0
"""What was not begun then is not done: a process that was stopped must not do what nobody waits for any more."""
SILENT = "the chain's process does not answer, so that GPU memory is neither registered nor given back"


class OwnerError(RdmaError):
    """The chain's process does not answer."""


class OwnerGoneError(OwnerError):
    """It has closed its end."""


class OwnedRegion:
    """See `blink_proto.rdma.binding.Region`."""

    def __init__(self, asker: Asker, answer: Answer, address: int) -> None:
        self._asker, self.handle = asker, answer.handle
        self.local_key: int = SecretInt(answer.local_key)
        self.key: int = SecretInt(answer.key)
        self.address: int = SecretInt(address)
        self.open = True

    def close(self) -> None:
        """From its return on the keys are void. May be called again.

        Raises:
            RdmaError: it is registered still.
        """
        if self.open:
            self._asker.give_back(self)

    def forget(self) -> None:
        """It is registered no more."""
        self.open = False

    def __repr__(self) -> str:
        return "Region(redacted)"


@dataclass(frozen=True)
class _Late:
    """An answer that has not come in time, and what to do with it."""

    number: int
    take: Callable[[Answer], None]


class Asker:
    """Asks the chain's process, one thing at a time.

    Args:
        is_over: whether that process is gone, with all that it held.
    """

    def __init__(
        self,
        connection: socket.socket,
        is_over: Callable[[], bool],
        open_file: Callable[[int], DeviceFile] = UverbsFile,
    ) -> None:
        self._connection, self._is_over, self._open_file = connection, is_over, open_file
        self._file: DeviceFile | None = None
        self._descriptor = -1
        self._number = 0
        self._late: _Late | None = None
        self._strays: list[int] = []
        """Regions that were registered when nobody waited for them any more."""

    def register(self, shared: Shared, part: Part, access: Access) -> Answer:
        """Registers a part of a region in a protection domain.

        Raises:
            RdmaError: it is refused, or nobody answers.
        """
        self._settle()
        self._share(shared.descriptor)
        number, until = self._next(), time.monotonic_ns() + int(_TO_BEGIN_SECONDS * 1e9)
        request = Request(Kind.REGISTER, number, shared.domain, part.inbound, access, part.offset, part.size, until)
        answer = self._ask(request, lambda late: self._strays.append(late.handle))
        _check(answer)
        return answer

    def give_back(self, region: OwnedRegion) -> None:
        """Deregisters a region.

        Raises:
            RdmaError: it is registered still.
        """
        try:
            self._settle()
            if region.open:  # an earlier try may have been answered only now
                self._deregister(region.handle, region.forget)
        except OwnerGoneError:
            if self._file is None or not self._is_over():
                raise
            _deregister_alone(self._file, region.handle)
            region.forget()

    def _deregister(self, region: int, done: Callable[[], None]) -> None:
        answer = self._ask(Request(Kind.DEREGISTER, self._next(), region), lambda late: done())
        _check(answer)
        done()

    def _share(self, descriptor: int) -> None:
        """Gives the chain's process the device's file, once: all domains are of one device."""
        if self._file is None:
            file = self._open_file(descriptor)
            request = Request(Kind.HOLD, self._next())
            _check(self._ask(request, lambda late: self._keep(file, descriptor), descriptor))
            self._keep(file, descriptor)
        if descriptor != self._descriptor:
            raise RdmaError("the chain's process registers memory with one RDMA device alone")

    def _keep(self, file: DeviceFile, descriptor: int) -> None:
        self._file, self._descriptor = file, descriptor

    def _next(self) -> int:
        self._number = (self._number + 1) % (1 << 32)
        return self._number

    def _ask(self, request: Request, late: Callable[[Answer], None], *descriptors: int) -> Answer:
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            socket.send_fds(self._connection, [request.to_bytes()], descriptors, flags)
        except OSError as error:
            raise _lost(error) from error
        self._late = _Late(request.number, late)
        answer = self._receive(ANSWER_SECONDS)
        self._late = None
        return answer

    def _settle(self) -> None:
        """Takes what has come too late, and gives back what nobody waits for."""
        if self._late is not None:
            late, answer = self._late, self._receive(0)
            self._late = None
            if answer.outcome is Outcome.DONE:
                late.take(answer)
        while self._strays:
            self._deregister(self._strays[-1], self._drop_stray)

    def _drop_stray(self) -> None:
        self._strays.pop()

    def _receive(self, seconds: float) -> Answer:
        """The answer that is awaited."""
        assert self._late is not None
        self._connection.settimeout(seconds)
        try:
            received = receive(self._connection, ANSWER.size, 1)
        except (TimeoutError, BlockingIOError) as error:
            raise OwnerError(SILENT) from error
        except OSError as error:
            raise _lost(error) from error
        if not received.content:
            raise OwnerGoneError("the chain's process registers no memory any more")
        received.close()
        answer = Answer.from_bytes(received.content if received.whole else b"")
        if answer.number != self._late.number:
            raise RdmaError("the chain's process answers what was not asked")
        return answer


class PeermemMemory:
    """See `ArenaMemory`.

    Args:
        regions: the inbound region (True) and the outbound one, where they lie in the chain's process.
        needed: how many bytes of each are the arena.
    """

    no_windows = "GPU memory that its owner registers (nvidia-peermem) is unknown to the bindings' memory windows"

    def __init__(self, asker: Asker, regions: Mapping[bool, RegionAddress], needed: Mapping[bool, int]) -> None:
        self._asker, self._regions, self._needed = asker, regions, needed

    def register(self, domain: Domain[Any, Region], part: Part, access: Any) -> Region:
        """Has the chain's process register the part in the domain."""
        part.check(self._needed[part.inbound])
        address = self._regions[part.inbound].address + part.offset

        def by_its_owner(shared: Shared) -> OwnedRegion:
            answer = self._asker.register(shared, part, access)
            return OwnedRegion(self._asker, answer, address)

        return domain.adopt(by_its_owner)


def _check(answer: Answer) -> None:
    if answer.outcome is Outcome.REFUSED and answer.errno:
        raise RdmaError(f"the chain's process was refused by the kernel ({os.strerror(answer.errno)})")
    if answer.outcome is not Outcome.DONE:
        raise RdmaError(f"the chain's process {WORDS[answer.outcome]}")


def _lost(error: OSError) -> RdmaError:
    if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED):
        return OwnerGoneError("the chain's process registers no memory any more")
    return OwnerError(SILENT)


def _deregister_alone(file: DeviceFile, region: int) -> None:
    """When its owner is gone. It may have done so itself, but was gone before it could say."""
    try:
        file.deregister(region)
    except UverbsError as error:
        if error.status not in (errno.ENOENT, errno.EINVAL):
            raise
