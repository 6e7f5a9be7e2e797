"""Three of the kernel's own calls on an RDMA device's open file, without libibverbs.

Whoever holds the file names what was made through it by numbers, and memory is registered of the process that calls.
libibverbs offers the same (`ibv_import_device`, `ibv_import_pd`), but of its drivers only mlx5's implements it.
A write(2) to the file would be refused to a process other than the one that opened it; this ioctl is not.

Formats, in the machine's byte order: Linux's include/uapi/rdma, where rdma_user_ioctl_cmds.h has the ioctl with its
header and attributes, ib_user_ioctl_cmds.h the methods, and ib_user_verbs.h the older commands and their structures,
which one of the methods takes (from Linux 5.0 on).

Nothing is handed to the device's driver beside that: those of mlx5 and Soft-RoCE want nothing to register memory. One
that does (irdma) refuses with EINVAL.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from blink_proto.rdma.binding import RdmaError

RDMA_VERBS_IOCTL = 0xC0181B01
HEADER = struct.Struct("=HHHHQII")
"""ib_uverbs_ioctl_hdr: length, object, method, number of attributes, 0, driver, 0."""
ATTRIBUTE = struct.Struct("=HHHHQ")
"""ib_uverbs_attr: name, bytes, flags, 0, and the content, or if that has more than 8 bytes its address."""
REG_MR = struct.Struct("=QQQQII")
"""ib_uverbs_reg_mr: 0, start, bytes, the address that peers use, domain, access."""
REG_MR_RESP = struct.Struct("=III")
"""ib_uverbs_reg_mr_resp: region, local key, remote key."""
DEREG_MR = struct.Struct("=I")
"""ib_uverbs_dereg_mr: region."""

OBJECT_DEVICE, OBJECT_PD = 0, 1
INVOKE_WRITE, INFO_HANDLES = 0, 1
CORE_IN, CORE_OUT, WRITE_CMD = 0, 1, 2
INFO_OBJECT_ID, INFO_TOTAL_HANDLES, INFO_HANDLES_LIST = 0, 1, 2
MANDATORY = 1
CMD_REG_MR, CMD_DEREG_MR = 9, 13

_NO_OBJECT = 0xFFF
_DRIVERS = 64
"""There are 20 (enum rdma_driver_id)."""
_MOST_HANDLES = 4096
_CLASS = "infiniband_verbs"


class UverbsError(RdmaError):
    """The kernel, or the device's driver, refuses; `status` is its errno."""

    def __init__(self, doing: str, status: int) -> None:
        super().__init__(f"the kernel does not {doing} ({os.strerror(status)})")
        self.status = status


class Registered(NamedTuple):
    """Memory that is registered; `handle` is its number within the file."""

    handle: int
    local_key: int
    key: int

    def __repr__(self) -> str:
        return "Registered(redacted)"


class UverbsFile:
    """An RDMA device's open file. Does not close it.

    Raises:
        RdmaError: it is another kind of file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        if not is_uverbs(descriptor):
            raise RdmaError("that is no RDMA device's file")
        self._driver = self._find_driver()

    def register(self, domain: int, address: int, size: int, access: int) -> Registered:
        """Registers memory of this process.

        Args:
            domain: number of the protection domain within the file.
            access: see `binding.Access`.

        Raises:
            UverbsError: the kernel or the driver refuses.
        """
        request = ctypes.create_string_buffer(REG_MR.pack(0, address, size, address, domain, access), REG_MR.size)
        made = ctypes.create_string_buffer(REG_MR_RESP.size)
        self._invoke(CMD_REG_MR, "register", _pointer(CORE_IN, request), _pointer(CORE_OUT, made))
        return Registered(*REG_MR_RESP.unpack(made.raw))

    def deregister(self, region: int) -> None:
        """From its return on the region's keys are void.

        Raises:
            UverbsError: there is no such region.
        """
        self._invoke(CMD_DEREG_MR, "deregister", _inline(CORE_IN, DEREG_MR.pack(region)))

    def domains(self) -> set[int]:
        """Numbers of all protection domains.

        Raises:
            RdmaError: the kernel does not tell.
        """
        handles = (ctypes.c_uint32 * _MOST_HANDLES)()
        total = ctypes.create_string_buffer(4)
        wanted = _inline(INFO_OBJECT_ID, struct.pack("=Q", OBJECT_PD))
        lists = _pointer(INFO_TOTAL_HANDLES, total), _pointer(INFO_HANDLES_LIST, handles)
        self._call(INFO_HANDLES, "list domains", wanted, *lists)
        (count,) = struct.unpack("=I", total.raw)
        if count >= _MOST_HANDLES:
            raise RdmaError("the kernel does not list domains: there are too many")
        return set(handles[:count])

    def _invoke(self, command: int, doing: str, *attributes: bytes) -> None:
        self._call(INVOKE_WRITE, doing, *attributes, _inline(WRITE_CMD, struct.pack("=Q", command)))

    def _call(self, method: int, doing: str, *attributes: bytes) -> None:
        status = _ioctl(self.descriptor, OBJECT_DEVICE, method, self._driver, attributes)
        if status:
            raise UverbsError(doing, status)

    def _find_driver(self) -> int:
        """The kernel looks first whether the driver is named right (EINVAL), and then for the object."""
        for driver in range(_DRIVERS):
            status = _ioctl(self.descriptor, _NO_OBJECT, 0, driver, ())
            if status == errno.EPROTONOSUPPORT:
                return driver
            if status != errno.EINVAL:
                raise UverbsError("take such calls for the device", status)
        raise RdmaError("the device's driver is unknown")


def is_uverbs(descriptor: int) -> bool:
    """Whether it belongs to an RDMA device (/dev/infiniband/uverbs…)."""
    found = os.fstat(descriptor)
    if not stat.S_ISCHR(found.st_mode):
        return False
    kind = Path(f"/sys/dev/char/{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}/subsystem")
    try:
        return kind.resolve(strict=True).name == _CLASS
    except OSError:
        return False


def _ioctl(descriptor: int, kind: int, method: int, driver: int, attributes: tuple[bytes, ...]) -> int:
    """errno, or 0."""
    size = HEADER.size + len(attributes) * ATTRIBUTE.size
    request = bytearray(HEADER.pack(size, kind, method, len(attributes), 0, driver, 0) + b"".join(attributes))
    try:
        fcntl.ioctl(descriptor, RDMA_VERBS_IOCTL, request)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _pointer(name: int, content: ctypes.Array[ctypes.c_char] | ctypes.Array[ctypes.c_uint32]) -> bytes:
    """`content` must outlive the call. Always of more than 8 bytes where it is read."""
    return ATTRIBUTE.pack(name, ctypes.sizeof(content), MANDATORY, 0, ctypes.addressof(content))


def _inline(name: int, content: bytes) -> bytes:
    (word,) = struct.unpack("=Q", content.ljust(8, b"\0"))
    return ATTRIBUTE.pack(name, len(content), MANDATORY, 0, word)
