"""The few verbs that both programs use, on the PyPI package `ibverbs`, which loads the machine's own libibverbs.

One class for each thing that has to be closed. Nothing here waits: completions are polled, and the completion channel's
descriptor does not block. Work is posted and polled with the interpreter lock released by the package.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any, NamedTuple

from blink_proto.rdma.wire import Endpoint

PORT = 1
INLINE_BYTES = 64
READS_AT_ONCE = 8
"""RDMA reads that one queue pair has on the wire; both ends must agree. Every RoCE adapter allows 16."""
_GIDS = 64
_ACK_TIMEOUT = 14
_RETRIES = 6
"""An unanswered request is sent again after 4.096 µs · 2^14 = 67 ms or up to four times that, so a peer that is gone is
noticed after half a second to two. Soft-RoCE takes 7 retries, the most, for retries without end."""
_NO_ENTRY = 0
_REORDERING = ("MLX5_RELAXED_PACKET_ORDERING_ON",)


class RdmaError(Exception):
    """The device or the library refuses; the message names no key, address or queue pair."""


class Access(IntFlag):
    """Rights to registered memory, as libibverbs numbers them. Relaxed ordering is never among them."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4


class Write(NamedTuple):
    """`size` bytes at `local` go to `remote`. `inline`: they may change as soon as the work is posted."""

    local: int
    local_key: int
    size: int
    remote: int
    remote_key: int
    inline: bool = False


class Read(NamedTuple):
    """`size` bytes at `remote` come to `local`."""

    local: int
    local_key: int
    size: int
    remote: int
    remote_key: int


def ibverbs() -> Any:
    """The package.

    Raises:
        RdmaError: it, or the machine's libibverbs, is missing.
    """
    try:
        import ibverbs as package
    except (ImportError, OSError) as error:
        raise RdmaError("the package ibverbs is not installed (extra rdma), or libibverbs1 is missing") from error
    return package


def refuse_reordering() -> None:
    """Refuses settings of the process that let writes pass each other, so that commit words could come before payloads.

    Raises:
        RdmaError: one of them is on.
    """
    for name in _REORDERING:
        if os.environ.get(name, "0") not in ("", "0"):
            raise RdmaError(f"{name} is set: relaxed ordering breaks the arena's contract; unset it")


class Device:
    """An open RDMA device with the address that it speaks from.

    Args:
        name: of the device; empty: the one that has the address.
        address: IP address of its interface.

    Raises:
        RdmaError: there is no such device, or its port is down.
    """

    def __init__(self, name: str, address: str) -> None:
        refuse_reordering()
        self._package = ibverbs()
        wanted = _gid_of(address)
        for device in self._devices(name):
            context = device.open()
            index = _gid_index(context, device.name, wanted)
            if index is not None:
                break
            context.close()
        else:
            raise RdmaError(f"no RDMA device{f' named {name!r}' if name else ''} has the address {address}")
        self.name: str = device.name
        self.context, self._gid_index, self._gid = context, index, wanted
        port = context.query_port(PORT)
        if int(port.state) != int(self._package.PortState.ACTIVE):
            context.close()
            raise RdmaError(f"the port of {self.name} is not active")
        self.mtu, self._lid = int(port.active_mtu), int(port.lid)

    def _devices(self, name: str) -> list[Any]:
        try:
            found = self._package.get_device_list()
        except OSError as error:
            raise RdmaError(f"this machine has no RDMA devices ({error.strerror})") from error
        return [device for device in found if name in ("", device.name)]

    def domain(self) -> Domain:
        """A protection domain: what is registered in one is of no use to queue pairs of another."""
        return Domain(self)

    def endpoint(self, queue_pair: int, first_packet: int) -> Endpoint:
        """Of one of this device's queue pairs."""
        return Endpoint(queue_pair, first_packet, self._gid, self._lid, self.mtu)

    @property
    def gid_index(self) -> int:
        """Of the address."""
        return self._gid_index

    def close(self) -> None:
        """After everything that was made on it."""
        self.context.close()


class Region:
    """Registered memory."""

    def __init__(self, handle: Any, address: int) -> None:
        self._handle = handle
        self.local_key: int = handle.lkey
        self.key: int = handle.rkey
        self.address = address
        """By which peers reach its first byte."""

    def close(self) -> None:
        """From its return on the keys are void."""
        self._handle.close()

    def __repr__(self) -> str:
        return "Region(redacted)"


class Domain:
    """A protection domain."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle = _called(device.context.alloc_pd)

    def register(self, address: int, size: int, access: Access) -> Region:
        """Memory of this process. Of a CUDA device too, where the host has the nvidia-peermem module.

        Raises:
            RdmaError: the memory cannot be pinned.
        """
        return Region(_called(self.handle.reg_mr, address, size, int(access)), address)

    def register_dmabuf(self, descriptor: int, offset: int, size: int, base: int, access: Access) -> Region:
        """Memory behind a dma-buf, from `offset` of it; peers reach it from the address `base` on.

        Raises:
            RdmaError: the device cannot (Soft-RoCE cannot).
        """
        handle = _called(self.handle.reg_dmabuf_mr, offset, size, iova=base, fd=descriptor, access=int(access))
        return Region(handle, base)

    def queue_pair(self, depth: int) -> QueuePair:
        """A reliable connection that may have `depth` pieces of work under way.

        Raises:
            RdmaError: the device has no more, or not that deep.
        """
        return QueuePair(self, depth)

    def close(self) -> None:
        """After its regions and queue pairs."""
        self.handle.close()


@dataclass(frozen=True, slots=True)
class Done:
    """A completion: the number that was posted with the work, and an empty string or what went wrong."""

    number: int
    fault: str


class QueuePair:
    """A reliable connection; see `Domain.queue_pair`."""

    def __init__(self, domain: Domain, depth: int) -> None:
        self._domain = domain
        package = self._package = ibverbs()
        context = domain.device.context
        self._channel = _called(context.create_comp_channel)
        self.descriptor: int = self._channel.fd
        os.set_blocking(self.descriptor, False)
        self._queue = _called(context.create_cq, depth + 1, channel=self._channel)
        wanted = package.QPInitAttr(
            send_cq=self._queue,
            recv_cq=self._queue,
            qp_type=package.QPType.RC,
            max_send_wr=depth,
            max_recv_wr=1,
            max_inline_data=INLINE_BYTES,
        )
        self._pair = _called(domain.handle.create_qp, wanted)
        self._first_packet = secrets.randbits(24)
        self.endpoint = domain.device.endpoint(self._pair.qp_num, self._first_packet)
        signaled, inline = package.SendFlags.SIGNALED, package.SendFlags.INLINE
        self._flags = {(s, i): int(signaled * s | inline * i) for s in (0, 1) for i in (0, 1)}

    def connect(self, peer: Endpoint, access: Access) -> None:
        """Connects with a peer, which may then do what `access` says with memory registered for it.

        Raises:
            RdmaError: there is no way to the peer.
        """
        package, device = self._package, self._domain.device
        mtu = min(device.mtu, peer.mtu)
        remote = package.QPInfo(peer.queue_pair, peer.first_packet, peer.lid, peer.gid, PORT, mtu)
        _called(self._pair.to_init, PORT, int(access))
        _called(self._pair.to_rtr, remote, device.gid_index, mtu, hop_limit=64, max_dest_rd_atomic=READS_AT_ONCE)
        _called(
            self._pair.to_rts, self._first_packet, timeout=_ACK_TIMEOUT, retry_cnt=_RETRIES, max_rd_atomic=READS_AT_ONCE
        )

    def post(self, works: Sequence[Write | Read], number: int) -> None:
        """Starts pieces of work in this order; the last one's completion has the number.

        Raises:
            RdmaError: the queue is full, or the connection is no more.
        """
        last = len(works) - 1
        _called(self._pair.post_send, [self._request(work, number, i == last) for i, work in enumerate(works)])

    def _request(self, work: Write | Read, number: int, signaled: bool) -> Any:
        package = self._package
        inline = isinstance(work, Write) and work.inline
        return package.SendWR(
            number,
            [package.SGE(work.local, work.size, work.local_key)],
            0 if isinstance(work, Write) else 4,  # IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ
            self._flags[signaled, inline],
            work.remote,
            work.remote_key,
        )

    def poll(self) -> list[Done]:
        """Completions since the last call, in order.

        Raises:
            RdmaError: the completion queue is broken.
        """
        return [
            Done(one.wr_id, "" if one.status == _NO_ENTRY else one.status_str) for one in _called(self._queue.poll, 32)
        ]

    def arm(self) -> None:
        """Makes the descriptor readable at the next completion."""
        _called(self._queue.req_notify)

    def take_event(self) -> bool:
        """Makes the descriptor unreadable; whether it was readable."""
        try:
            self._channel.get_cq_event()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (11, None):
                return False
            raise RdmaError(f"the completion channel failed ({error.strerror})") from error
        self._queue.ack_events(1)
        return True

    def close(self) -> None:
        """Ends the connection."""
        self._pair.close()
        self._queue.close()
        self._channel.close()

    def __repr__(self) -> str:
        return "QueuePair(redacted)"


def _called(function: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except OSError as error:
        raise RdmaError(f"{function.__name__} failed ({error.strerror})") from error


def _gid_of(address: str) -> bytes:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError as error:
        raise RdmaError(f"{address!r} is not an IP address") from error
    return parsed.packed if parsed.version == 6 else bytes(10) + b"\xff\xff" + parsed.packed


def _gid_index(context: Any, device: str, wanted: bytes) -> int | None:
    """Index of the address in the port's table, for RoCE v2."""
    for index in range(min(int(context.query_port(PORT).gid_tbl_len), _GIDS)):
        try:
            raw = context.query_gid(PORT, index).raw
        except OSError:
            continue
        if bytes(raw) == wanted and _is_routable(device, index):
            return index
    return None


def _is_routable(device: str, index: int) -> bool:
    kind = Path(f"/sys/class/infiniband/{device}/ports/{PORT}/gid_attrs/types/{index}")
    try:
        return kind.read_text().strip() == "RoCE v2"
    except OSError:
        return True  # InfiniBand has no such table
