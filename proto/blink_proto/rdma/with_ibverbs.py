"""The verbs by the PyPI package `ibverbs`, which loads the machine's own libibverbs. See `binding`.

The package releases the interpreter lock where it registers memory, posts, polls and waits, but not where it connects:
so the way to a peer is found before. It has no memory windows.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from blink_proto.rdma.binding import (
    ACK_TIMEOUT,
    HOP_LIMIT,
    INLINE_BYTES,
    MOST_COMPLETIONS,
    PORT,
    READS_AT_ONCE,
    RETRIES,
    Access,
    BindingMissingError,
    Done,
    MemoryWindow,
    RdmaError,
    Read,
    Region,
    Shared,
    Work,
    Write,
)
from blink_proto.rdma.gids import address_of, gid_of, index_of
from blink_proto.rdma.made import Made
from blink_proto.rdma.neighbours import wake_neighbour
from blink_proto.rdma.uverbs import UverbsFile, is_uverbs
from blink_proto.rdma.wire import Endpoint

NO_WINDOWS = "the binding ibverbs has no memory windows"
_NO_ERROR = 0
_WRITE, _READ = 0, 4
"""IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ."""
_making = threading.Lock()
"""Held while a device is opened or a domain made, of which the package does not tell what the kernel calls it."""


def ibverbs() -> Any:
    """The package.

    Raises:
        BindingMissingError: it, or the machine's libibverbs, is missing.
    """
    try:
        import ibverbs as package
    except (ImportError, OSError) as error:
        raise BindingMissingError(
            "the package ibverbs is not installed (extra rdma), or libibverbs1 is missing"
        ) from error
    return package


class IbverbsDevice:
    """See `Device`.

    Raises:
        RdmaError: see `open_device`.
    """

    binding = "ibverbs"
    no_windows = NO_WINDOWS

    def __init__(self, name: str, address: str) -> None:
        self._package = ibverbs()
        self.address, wanted = address, gid_of(address)
        for device in self._devices(name):
            self.name: str = device.name
            self.context, self.file = _opened(device)
            made = Made(_called)
            made.add(self.context)
            try:
                index = _gid_index(self.context, self.name, wanted)
                if index is not None:
                    self._gid_index, self._gid = index, wanted
                    self._look_at_port()
                    return
            except RdmaError:
                made.abandon()
                raise
            made.close()
        raise RdmaError(f"no RDMA device{f' named {name!r}' if name else ''} has the address {address}")

    def _look_at_port(self) -> None:
        port = _called(self.context.query_port, PORT)
        if int(port.state) != int(self._package.PortState.ACTIVE):
            raise RdmaError(f"the port of {self.name} is not active")
        self.mtu, self._lid = int(port.active_mtu), int(port.lid)
        self.has_neighbours = self._lid == 0  # Ethernet: every InfiniBand port that is active has a LID

    def _devices(self, name: str) -> list[Any]:
        try:
            found = self._package.get_device_list()
        except OSError as error:
            raise RdmaError(f"this machine has no RDMA devices ({_reason(error)})") from error
        return [device for device in found if name in ("", device.name)]

    def domain(self) -> IbverbsDomain:
        """See `Device`."""
        return IbverbsDomain(self)

    def endpoint(self, queue_pair: int, first_packet: int) -> Endpoint:
        """Of one of this device's queue pairs."""
        return Endpoint(queue_pair, first_packet, self._gid, self._lid, self.mtu)

    @property
    def gid_index(self) -> int:
        """Of the address."""
        return self._gid_index

    def close(self) -> None:
        """See `Device`."""
        _called(self.context.close)


class IbverbsRegion:
    """See `Region`."""

    def __init__(self, handle: Any, address: int) -> None:
        self._handle = handle
        self.local_key: int = handle.lkey
        self.key: int = handle.rkey
        self.address = address

    def close(self) -> None:
        """See `Region`."""
        _called(self._handle.close)

    def __repr__(self) -> str:
        return "Region(redacted)"


class IbverbsDomain:
    """See `Domain`."""

    def __init__(self, device: IbverbsDevice) -> None:
        self.device = device
        self.handle, self._number = _made_domain(device)

    def register(self, address: int, size: int, access: Access) -> IbverbsRegion:
        """See `Domain`."""
        return IbverbsRegion(_called(self.handle.reg_mr, address, size, int(access)), address)

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> IbverbsRegion:
        """See `Domain`. Peers reach it from the address `base` on."""
        handle = _called(self.handle.reg_dmabuf_mr, offset, size, iova=base, fd=descriptor, access=int(access))
        return IbverbsRegion(handle, base)

    def adopt(self, register: Callable[[Shared], Region]) -> Region:
        """See `Domain`."""
        if self.device.file is None or self._number is None:
            raise RdmaError("neither the binding ibverbs nor the kernel tells the number of a protection domain")
        return register(Shared(self.device.file.descriptor, self._number))

    def window(self) -> MemoryWindow:
        """Refuses: there are none."""
        raise RdmaError(NO_WINDOWS)

    def queue_pair(self, depth: int) -> IbverbsQueuePair:
        """See `Domain`."""
        return IbverbsQueuePair(self, depth)

    def close(self) -> None:
        """See `Domain`."""
        _called(self.handle.close)


class IbverbsQueuePair:
    """See `QueuePair`."""

    def __init__(self, domain: IbverbsDomain, depth: int) -> None:
        self._domain = domain
        self._package = ibverbs()
        self._made = Made(_called)
        try:
            self._make(depth)
        except RdmaError:
            self._made.abandon()
            raise
        self._first_packet = secrets.randbits(24)
        self.endpoint = domain.device.endpoint(self._pair.qp_num, self._first_packet)
        signaled, inline = self._package.SendFlags.SIGNALED, self._package.SendFlags.INLINE
        self._flags = {(s, i): int(signaled * s | inline * i) for s in (0, 1) for i in (0, 1)}

    def _make(self, depth: int) -> None:
        package, context = self._package, self._domain.device.context
        self._channel = self._made.add(_called(context.create_comp_channel))
        self.descriptor: int = self._channel.fd
        os.set_blocking(self.descriptor, False)
        self._queue = self._made.add(_called(context.create_cq, depth + 1, channel=self._channel))
        wanted = package.QPInitAttr(
            send_cq=self._queue,
            recv_cq=self._queue,
            qp_type=package.QPType.RC,
            max_send_wr=depth,
            max_recv_wr=1,
            max_inline_data=INLINE_BYTES,
        )
        self._pair = self._made.add(_called(self._domain.handle.create_qp, wanted))

    def connect(self, peer: Endpoint, access: Access) -> None:
        """See `QueuePair`."""
        package, device = self._package, self._domain.device
        if device.has_neighbours:
            wake_neighbour(device.address, address_of(peer.gid))
        mtu = min(device.mtu, peer.mtu)
        remote = package.QPInfo(peer.queue_pair, peer.first_packet, peer.lid, peer.gid, PORT, mtu)
        _called(self._pair.to_init, PORT, int(access))
        _called(self._pair.to_rtr, remote, device.gid_index, mtu, hop_limit=HOP_LIMIT, max_dest_rd_atomic=READS_AT_ONCE)
        _called(
            self._pair.to_rts, self._first_packet, timeout=ACK_TIMEOUT, retry_cnt=RETRIES, max_rd_atomic=READS_AT_ONCE
        )

    def post(self, works: Sequence[Work], number: int) -> None:
        """See `QueuePair`."""
        last = len(works) - 1
        _called(self._pair.post_send, [self._request(work, number, i == last) for i, work in enumerate(works)])

    def _request(self, work: Work, number: int, signaled: bool) -> Any:
        if not isinstance(work, (Write, Read)):
            raise RdmaError(NO_WINDOWS)
        package = self._package
        inline = isinstance(work, Write) and work.inline
        return package.SendWR(
            number,
            [package.SGE(work.local, work.size, work.local_key)],
            _WRITE if isinstance(work, Write) else _READ,
            self._flags[signaled, inline],
            work.remote,
            work.remote_key,
        )

    def poll(self) -> list[Done]:
        """See `QueuePair`."""
        found = _called(self._queue.poll, MOST_COMPLETIONS)
        return [Done(one.wr_id, "" if one.status == _NO_ERROR else one.status_str) for one in found]

    def arm(self) -> None:
        """See `QueuePair`."""
        _called(self._queue.req_notify)

    def take_event(self) -> bool:
        """See `QueuePair`."""
        try:
            self._channel.get_cq_event()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (11, None):
                return False
            raise RdmaError(f"the completion channel failed ({_reason(error)})") from error
        _called(self._queue.ack_events, 1)
        return True

    def close(self) -> None:
        """See `QueuePair`."""
        self._made.close()

    def __repr__(self) -> str:
        return "QueuePair(redacted)"


def _called(function: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except OSError as error:
        raise RdmaError(f"{function.__name__} failed ({_reason(error)})") from error


def _reason(error: OSError) -> str:
    return error.strerror or "no reason given"


def _opened(device: Any) -> tuple[Any, UverbsFile | None]:
    """Its context, and the file behind that."""
    with _making:
        before = _device_files()
        try:
            context = device.open()
        except OSError as error:
            raise RdmaError(f"the RDMA device {device.name} cannot be opened ({_reason(error)})") from error
        new = _device_files() - before
    try:
        return context, UverbsFile(new.pop()) if len(new) == 1 else None
    except RdmaError:  # a kernel that is too old: nothing but `adopt` needs it
        return context, None


def _device_files() -> set[int]:
    """Descriptors of this process for RDMA devices."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if is_uverbs(int(name)):
                found.add(int(name))
        except OSError:
            continue  # the listing's own, or closed meanwhile
    return found


def _made_domain(device: IbverbsDevice) -> tuple[Any, int | None]:
    """A protection domain, and its number in the device's file."""
    with _making:
        before = _domains(device)
        handle = _called(device.context.alloc_pd)
        new = _domains(device) - before
    return handle, new.pop() if len(new) == 1 else None


def _domains(device: IbverbsDevice) -> set[int]:
    try:
        return set() if device.file is None else device.file.domains()
    except RdmaError:
        return set()


def _gid_index(context: Any, device: str, wanted: bytes) -> int | None:
    def read(index: int) -> bytes | None:
        try:
            return bytes(context.query_gid(PORT, index).raw)
        except OSError:
            return None

    return index_of(wanted, device, int(_called(context.query_port, PORT).gid_tbl_len), read)
