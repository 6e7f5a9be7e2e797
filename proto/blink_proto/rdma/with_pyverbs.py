"""The verbs by Debian's and DOCA's own package `pyverbs`. See `binding`.

The package keeps the interpreter lock in every call. So nothing is called that can wait for a peer: the completion
channel's descriptor does not block, and the way to a peer is found before its queue pair is connected. Registering
memory does hold other threads up, for as long as the kernel takes to pin it.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import select
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
    Bind,
    Done,
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
from blink_proto.rdma.pyverbs_package import load_pyverbs
from blink_proto.rdma.wire import Endpoint

_NO_ERROR = 0
_MIN_RNR_TIMER = 12
_RNR_RETRIES = 7
_ANY_TYPE_2 = ("IBV_DEVICE_MEM_WINDOW_TYPE_2A", "IBV_DEVICE_MEM_WINDOW_TYPE_2B")
_FAULTS = {
    1: "local length error",
    2: "local queue pair operation error",
    4: "local protection error",
    5: "work request flushed",
    6: "memory window bind error",
    9: "remote invalid request error",
    10: "remote access error",
    11: "remote operation error",
    12: "transport retry counter exceeded",
    13: "receiver not ready, retries exceeded",
    21: "general error",
}
"""Of enum ibv_wc_status, what a reliable connection's own requests can end with."""
_EVENTS = "anon_inode:[infinibandevent]"
_opening = threading.Lock()
"""Held while something is made that has a descriptor, so that it can be told which is whose."""


class PyverbsDevice:
    """See `Device`.

    Raises:
        RdmaError: see `open_device`.
    """

    binding = "pyverbs"

    def __init__(self, name: str, address: str) -> None:
        self.package = load_pyverbs()
        self.address = address
        self._gid = gid_of(address)
        for found in self._names(name):
            self.name = found
            with _opening:
                self.context = self._opened()
            made = Made(self.called)
            made.add(self.context)
            try:
                index = self._find()
                if index is not None:
                    self.gid_index = index
                    self._look_at_port()
                    return
            except RdmaError:
                made.abandon()
                raise
            made.close()
        raise RdmaError(f"no RDMA device{f' named {name!r}' if name else ''} has the address {self.address}")

    def _look_at_port(self) -> None:
        port = self.called(self.context.query_port, PORT)
        if port.state != self.package.enums.IBV_PORT_ACTIVE:
            raise RdmaError(f"the port of {self.name} is not active")
        self.mtu, self._lid = int(port.active_mtu), int(port.lid)
        self.has_neighbours = self._lid == 0  # Ethernet: every InfiniBand port that is active has a LID
        flags = int(self.called(self.context.query_device).device_cap_flags)
        has_windows = any(flags & int(getattr(self.package.enums, flag)) for flag in _ANY_TYPE_2)
        self.no_windows = "" if has_windows else f"the device {self.name} has no memory windows of type 2"

    def _names(self, wanted: str) -> list[str]:
        try:
            names = [device.name.decode() for device in self.package.device.get_device_list()]
        except self.package.pyverbs_error.PyverbsError as error:
            raise RdmaError("this machine has no RDMA devices") from error
        return [name for name in names if wanted in ("", name)]

    def _opened(self) -> Any:
        try:
            return self.package.device.Context(name=self.name)
        except self.package.pyverbs_error.PyverbsError as error:
            raise RdmaError(f"the RDMA device {self.name} cannot be opened ({_reason(error)})") from None

    def _find(self) -> int | None:
        def read(index: int) -> bytes | None:
            try:
                return bytes.fromhex(str(self.context.query_gid(PORT, index)).replace(":", ""))
            except self.package.pyverbs_error.PyverbsError:
                return None

        return index_of(self._gid, self.name, int(self.called(self.context.query_port, PORT).gid_tbl_len), read)

    def called(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """What it returns.

        Raises:
            RdmaError: it failed.
        """
        try:
            return function(*arguments, **named)
        except self.package.pyverbs_error.PyverbsError as error:
            raise RdmaError(f"{function.__name__} failed ({_reason(error)})") from None

    def domain(self) -> PyverbsDomain:
        """See `Device`."""
        return PyverbsDomain(self)

    def endpoint(self, queue_pair: int, first_packet: int) -> Endpoint:
        """Of one of this device's queue pairs."""
        return Endpoint(queue_pair, first_packet, self._gid, self._lid, self.mtu)

    def close(self) -> None:
        """See `Device`."""
        self.called(self.context.close)


class PyverbsRegion:
    """See `Region`."""

    def __init__(self, device: PyverbsDevice, handle: Any, address: int) -> None:
        self._device = device
        self.handle = handle
        self.local_key: int = handle.lkey
        self.key: int = handle.rkey
        self.address = address

    def close(self) -> None:
        """See `Region`."""
        self._device.called(self.handle.close)

    def __repr__(self) -> str:
        return "Region(redacted)"


class PyverbsWindow:
    """See `MemoryWindow`."""

    def __init__(self, domain: PyverbsDomain) -> None:
        self._device = domain.device
        package = self._device.package
        self.handle = self._device.called(package.mr.MW, domain.handle, package.enums.IBV_MW_TYPE_2)
        self.key: int = self.handle.rkey

    def close(self) -> None:
        """See `MemoryWindow`."""
        self._device.called(self.handle.close)

    def __repr__(self) -> str:
        return "MemoryWindow(redacted)"


class PyverbsDomain:
    """See `Domain`."""

    def __init__(self, device: PyverbsDevice) -> None:
        self.device = device
        self.handle = device.called(device.package.pd.PD, device.context)

    def register(self, address: int, size: int, access: Access) -> PyverbsRegion:
        """See `Domain`."""
        device = self.device
        made = device.called(device.package.mr.MR, self.handle, size, int(access), address=address)
        return PyverbsRegion(device, made, address)

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> PyverbsRegion:
        """See `Domain`. The package has peers call the first byte by its offset in the dma-buf."""
        device = self.device
        made = device.called(
            device.package.mr.DmaBufMR, self.handle, size, int(access), dmabuf=descriptor, offset=offset
        )
        return PyverbsRegion(device, made, offset)

    def adopt(self, register: Callable[[Shared], Region]) -> Region:
        """See `Domain`."""
        return register(Shared(int(self.device.context.cmd_fd), int(self.handle.handle)))

    def window(self) -> PyverbsWindow:
        """See `Domain`."""
        if self.device.no_windows:
            raise RdmaError(self.device.no_windows)
        return PyverbsWindow(self)

    def queue_pair(self, depth: int) -> PyverbsQueuePair:
        """See `Domain`."""
        return PyverbsQueuePair(self, depth)

    def close(self) -> None:
        """See `Domain`."""
        self.device.called(self.handle.close)


class PyverbsQueuePair:
    """See `QueuePair`."""

    def __init__(self, domain: PyverbsDomain, depth: int) -> None:
        self._device = device = domain.device
        self._package = device.package
        self._made = Made(device.called)
        try:
            self._make(domain, depth)
        except RdmaError:
            self._made.abandon()
            raise
        self._open = True
        self._first_packet = secrets.randbits(24)
        self.endpoint = device.endpoint(self._pair.qp_num, self._first_packet)

    def _make(self, domain: PyverbsDomain, depth: int) -> None:
        device, package, made = self._device, self._package, self._made
        self._channel, self.descriptor = _channel(device, made)
        os.set_blocking(self.descriptor, False)
        self._readable = select.poll()
        self._readable.register(self.descriptor, select.POLLIN)
        self._queue = made.add(device.called(package.cq.CQ, device.context, depth + 1, None, self._channel))
        room = package.qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_inline_data=INLINE_BYTES)
        wanted = package.qp.QPInitAttr(
            package.enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=room, sq_sig_all=0
        )
        self._pair = made.add(device.called(package.qp.QP, domain.handle, wanted))

    def connect(self, peer: Endpoint, access: Access) -> None:
        """See `QueuePair`."""
        device = self._device
        if device.has_neighbours:
            wake_neighbour(device.address, address_of(peer.gid))
        attributes = self._attributes(peer, access)
        for step in (self._pair.to_init, self._pair.to_rtr, self._pair.to_rts):
            device.called(step, attributes)

    def _attributes(self, peer: Endpoint, access: Access) -> Any:
        addresses, device = self._package.addr, self._device
        gid = addresses.GID(":".join(peer.gid[i : i + 2].hex() for i in range(0, 16, 2)))
        route = addresses.GlobalRoute(dgid=gid, sgid_index=device.gid_index, hop_limit=HOP_LIMIT)
        made = self._package.qp.QPAttr(port_num=PORT)
        made.ah_attr = addresses.AHAttr(dlid=peer.lid, port_num=PORT, is_global=1, gr=route)
        made.qp_access_flags = int(access)
        made.path_mtu = min(device.mtu, peer.mtu)
        made.dest_qp_num, made.rq_psn, made.sq_psn = peer.queue_pair, peer.first_packet, self._first_packet
        made.max_rd_atomic = made.max_dest_rd_atomic = READS_AT_ONCE
        made.min_rnr_timer, made.rnr_retry = _MIN_RNR_TIMER, _RNR_RETRIES
        made.timeout, made.retry_cnt = ACK_TIMEOUT, RETRIES
        return made

    def post(self, works: Sequence[Work], number: int) -> None:
        """See `QueuePair`."""
        self._check_open()
        if not works:
            return
        signaled = self._package.enums.IBV_SEND_SIGNALED
        chain = [self._request(work, number, 0) for work in works[:-1]]
        chain.append(self._request(works[-1], number, signaled))
        for this, following in itertools.pairwise(chain):
            this.next_wr = following
        self._device.called(self._pair.post_send, chain[0])
        for work, request in zip(works, chain, strict=True):
            if isinstance(work, Bind):
                work.window.key = request.rkey

    def _request(self, work: Work, number: int, flags: int) -> Any:
        package, kinds = self._package, self._package.enums
        if isinstance(work, (Write, Read)):
            inline = isinstance(work, Write) and work.inline
            made = package.wr.SendWR(
                number,
                kinds.IBV_WR_RDMA_WRITE if isinstance(work, Write) else kinds.IBV_WR_RDMA_READ,
                1,
                0,
                [package.wr.SGE(work.local, work.size, work.local_key)],
                flags | (kinds.IBV_SEND_INLINE if inline else 0),
            )
            made.set_wr_rdma(work.remote_key, work.remote)
        elif isinstance(work, Bind):
            made = package.wr.SendWR(number, kinds.IBV_WR_BIND_MW, send_flags=flags)
            made.set_bind_wr(_handle(work.window), self._over(work.region, work.size, work.access))
        else:
            made = package.wr.SendWR(number, kinds.IBV_WR_LOCAL_INV, send_flags=flags)
            made.imm_data = work.window.key  # a union: it is the key to be invalidated
        return made

    def _over(self, region: Region, size: int, access: Access) -> Any:
        return self._package.mr.MWBindInfo(_handle(region), region.address, size, int(access))

    def poll(self) -> list[Done]:
        """See `QueuePair`."""
        self._check_open()
        _, found = self._device.called(self._queue.poll, MOST_COMPLETIONS)
        return [Done(one.wr_id, _fault_of(one.status)) for one in found]

    def arm(self) -> None:
        """See `QueuePair`."""
        self._check_open()
        self._device.called(self._queue.req_notify)

    def take_event(self) -> bool:
        """See `QueuePair`."""
        self._check_open()
        if not self._readable.poll(0):
            return False
        try:
            self._channel.get_cq_event(self._queue)
        except self._package.pyverbs_error.PyverbsRDMAError as error:
            if error.error_code == errno.EAGAIN:
                return False
            raise RdmaError(f"the completion channel failed ({_reason(error)})") from None
        self._device.called(self._queue.ack_events, 1)
        return True

    def close(self) -> None:
        """See `QueuePair`."""
        self._open = False
        self._made.close()

    def _check_open(self) -> None:
        """The package follows a null pointer when what was closed is used."""
        if not self._open:
            raise RdmaError("the connection was closed")

    def __repr__(self) -> str:
        return "QueuePair(redacted)"


def _fault_of(status: int) -> str:
    return "" if status == _NO_ERROR else _FAULTS.get(status, f"status {status}")


def _handle(thing: Any) -> Any:
    return thing.handle


def _reason(error: Exception) -> str:
    """The words of the system: the package's own may name what is secret."""
    code = getattr(error, "error_code", -1)
    return os.strerror(code) if code > 0 else "no reason given"


def _channel(device: PyverbsDevice, own: Made) -> tuple[Any, int]:
    """A completion channel and its descriptor, which only new versions of the package tell."""
    with _opening:
        before = _event_descriptors()
        made = own.add(device.called(device.package.cq.CompChannel, device.context))
        new = _event_descriptors() - before
    told = getattr(made, "fd", None)
    if told is not None:
        return made, int(told)
    if len(new) != 1:
        raise RdmaError("this pyverbs does not tell its completion channel's descriptor, nor does /proc")
    return made, new.pop()


def _event_descriptors() -> set[int]:
    """Of this process, those from which verbs' events are read."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EVENTS:
                found.add(int(name))
        except OSError:
            continue  # the listing's own, or closed meanwhile
    return found
