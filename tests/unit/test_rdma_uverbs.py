"""The kernel's own calls on an RDMA device's file: their bytes, by the kernel's headers and by a played kernel.

The real one: `tests/transport/test_owner.py`, in the emulated machines of `tests/rdma`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from blink_proto.rdma import uverbs
from blink_proto.rdma.binding import Access, RdmaError
from blink_proto.rdma.uverbs import UverbsError, UverbsFile, is_uverbs

HEADERS = [Path("/usr/include/rdma") / name for name in ("rdma_user_ioctl_cmds.h", "ib_user_verbs.h")]
PROGRAM = r"""
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stddef.h>
#include <stdio.h>
#define SIZE(what) printf("sizeof " #what " %zu\n", sizeof(struct what))
#define AT(what, field) printf(#what "." #field " %zu\n", offsetof(struct what, field))
#define IS(what) printf(#what " %llu\n", (unsigned long long)(what))
int main(void) {
  SIZE(ib_uverbs_ioctl_hdr); AT(ib_uverbs_ioctl_hdr, object_id); AT(ib_uverbs_ioctl_hdr, method_id);
  AT(ib_uverbs_ioctl_hdr, num_attrs); AT(ib_uverbs_ioctl_hdr, driver_id); AT(ib_uverbs_ioctl_hdr, attrs);
  SIZE(ib_uverbs_attr); AT(ib_uverbs_attr, len); AT(ib_uverbs_attr, flags); AT(ib_uverbs_attr, data);
  SIZE(ib_uverbs_reg_mr); AT(ib_uverbs_reg_mr, start); AT(ib_uverbs_reg_mr, length); AT(ib_uverbs_reg_mr, hca_va);
  AT(ib_uverbs_reg_mr, pd_handle); AT(ib_uverbs_reg_mr, access_flags);
  printf("registered %zu %zu %zu\n", offsetof(struct ib_uverbs_reg_mr_resp, mr_handle),
         offsetof(struct ib_uverbs_reg_mr_resp, lkey), offsetof(struct ib_uverbs_reg_mr_resp, rkey));
  SIZE(ib_uverbs_reg_mr_resp); SIZE(ib_uverbs_dereg_mr);
  IS(RDMA_VERBS_IOCTL); IS(UVERBS_OBJECT_DEVICE); IS(UVERBS_OBJECT_PD); IS(UVERBS_METHOD_INVOKE_WRITE);
  IS(UVERBS_METHOD_INFO_HANDLES); IS(UVERBS_ATTR_CORE_IN); IS(UVERBS_ATTR_CORE_OUT); IS(UVERBS_ATTR_WRITE_CMD);
  IS(UVERBS_ATTR_INFO_OBJECT_ID); IS(UVERBS_ATTR_INFO_TOTAL_HANDLES); IS(UVERBS_ATTR_INFO_HANDLES_LIST);
  IS(UVERBS_ATTR_F_MANDATORY); IS(IB_USER_VERBS_CMD_REG_MR); IS(IB_USER_VERBS_CMD_DEREG_MR);
  IS(IB_UVERBS_ACCESS_LOCAL_WRITE); IS(IB_UVERBS_ACCESS_REMOTE_WRITE); IS(IB_UVERBS_ACCESS_REMOTE_READ);
  IS(IB_UVERBS_ACCESS_MW_BIND);
}
"""
RXE = 14
DOMAINS = [5, 9, 40]


def test_structures_and_numbers_are_those_of_the_kernels_headers(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not all(each.exists() for each in HEADERS):
        pytest.skip("takes a C compiler and the kernel's headers (linux-libc-dev)")
    (tmp_path / "sizes.c").write_text(PROGRAM)
    subprocess.run([compiler, "-o", tmp_path / "sizes", tmp_path / "sizes.c"], check=True)
    said = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout
    found = dict(line.rsplit(" ", 1) for line in said.splitlines() if not line.startswith("registered"))
    assert "registered 0 4 8" in said
    assert {name: int(value) for name, value in found.items()} == {
        "sizeof ib_uverbs_ioctl_hdr": uverbs.HEADER.size,
        "ib_uverbs_ioctl_hdr.object_id": 2,
        "ib_uverbs_ioctl_hdr.method_id": 4,
        "ib_uverbs_ioctl_hdr.num_attrs": 6,
        "ib_uverbs_ioctl_hdr.driver_id": struct.calcsize("=HHHHQ"),
        "ib_uverbs_ioctl_hdr.attrs": uverbs.HEADER.size,
        "sizeof ib_uverbs_attr": uverbs.ATTRIBUTE.size,
        "ib_uverbs_attr.len": 2,
        "ib_uverbs_attr.flags": 4,
        "ib_uverbs_attr.data": struct.calcsize("=HHHH"),
        "sizeof ib_uverbs_reg_mr": uverbs.REG_MR.size,
        "ib_uverbs_reg_mr.start": 8,
        "ib_uverbs_reg_mr.length": 16,
        "ib_uverbs_reg_mr.hca_va": 24,
        "ib_uverbs_reg_mr.pd_handle": 32,
        "ib_uverbs_reg_mr.access_flags": 36,
        "sizeof ib_uverbs_reg_mr_resp": uverbs.REG_MR_RESP.size,
        "sizeof ib_uverbs_dereg_mr": uverbs.DEREG_MR.size,
        "RDMA_VERBS_IOCTL": uverbs.RDMA_VERBS_IOCTL,
        "UVERBS_OBJECT_DEVICE": uverbs.OBJECT_DEVICE,
        "UVERBS_OBJECT_PD": uverbs.OBJECT_PD,
        "UVERBS_METHOD_INVOKE_WRITE": uverbs.INVOKE_WRITE,
        "UVERBS_METHOD_INFO_HANDLES": uverbs.INFO_HANDLES,
        "UVERBS_ATTR_CORE_IN": uverbs.CORE_IN,
        "UVERBS_ATTR_CORE_OUT": uverbs.CORE_OUT,
        "UVERBS_ATTR_WRITE_CMD": uverbs.WRITE_CMD,
        "UVERBS_ATTR_INFO_OBJECT_ID": uverbs.INFO_OBJECT_ID,
        "UVERBS_ATTR_INFO_TOTAL_HANDLES": uverbs.INFO_TOTAL_HANDLES,
        "UVERBS_ATTR_INFO_HANDLES_LIST": uverbs.INFO_HANDLES_LIST,
        "UVERBS_ATTR_F_MANDATORY": uverbs.MANDATORY,
        "IB_USER_VERBS_CMD_REG_MR": uverbs.CMD_REG_MR,
        "IB_USER_VERBS_CMD_DEREG_MR": uverbs.CMD_DEREG_MR,
        "IB_UVERBS_ACCESS_LOCAL_WRITE": Access.LOCAL_WRITE,
        "IB_UVERBS_ACCESS_REMOTE_WRITE": Access.REMOTE_WRITE,
        "IB_UVERBS_ACCESS_REMOTE_READ": Access.REMOTE_READ,
        "IB_UVERBS_ACCESS_MW_BIND": Access.BIND_WINDOWS,
    }


class Kernel:
    """Plays the ioctl as uverbs_ioctl.c does: reads requests by the offsets above, and checks them as strictly."""

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, ...]] = {}

    def ioctl(self, descriptor: int, number: int, request: bytearray) -> None:
        assert number == 0xC0181B01
        length, kind, method, count = struct.unpack_from("<HHHH", request)
        zero, driver, also_zero = struct.unpack_from("<QII", request, 8)
        assert (length, zero, also_zero) == (24 + 16 * count, 0, 0)
        assert len(request) == length
        if driver != RXE:
            raise OSError(errno.EINVAL, "driver")
        if kind != 0:
            raise OSError(errno.EPROTONOSUPPORT, "object")
        found = [struct.unpack_from("<HHHHQ", request, 24 + 16 * index) for index in range(count)]
        assert all(flags == 1 and zero == 0 for _, _, flags, zero, _ in found)
        fields = {name: (size, word) for name, size, _, zero, word in found}
        (self._write if method == 0 else self._list)(fields)

    def _write(self, fields: dict[int, tuple[int, int]]) -> None:
        assert fields[2] in ((8, 9), (8, 13))
        if fields[2][1] == 13:
            size, handle = fields[0]
            assert size == 4
            if self.registered.pop(handle, None) is None:
                raise OSError(errno.ENOENT, "region")
            return
        (size, at), (room, answer) = fields[0], fields[1]
        assert (size, room) == (40, 12)
        zero, start, length, remote, domain, access = struct.unpack("<QQQQII", ctypes.string_at(at, size))
        assert zero == 0
        if domain not in DOMAINS:
            raise OSError(errno.ENOENT, "domain")
        handle = len(self.registered) + 7
        self.registered[handle] = (start, length, remote, domain, access)
        ctypes.memmove(answer, struct.pack("<III", handle, 0x1111, 0x2222), 12)

    def _list(self, fields: dict[int, tuple[int, int]]) -> None:
        assert fields[0] == (8, 1)
        (_, total), (room, at) = fields[1], fields[2]
        assert room >= 4 * len(DOMAINS)
        ctypes.memmove(total, struct.pack("<I", len(DOMAINS)), 4)
        ctypes.memmove(at, struct.pack(f"<{len(DOMAINS)}I", *DOMAINS), 4 * len(DOMAINS))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(uverbs.fcntl, "ioctl", made.ioctl)  # type: ignore[attr-defined]
    monkeypatch.setattr(uverbs, "is_uverbs", lambda descriptor: True)
    return made


def test_memory_is_registered_and_given_back(kernel: Kernel) -> None:
    file = UverbsFile(3)
    access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
    made = file.register(9, 0x7F12_3456_7000, 8192, access)
    assert tuple(made) == (7, 0x1111, 0x2222)
    assert kernel.registered == {7: (0x7F12_3456_7000, 8192, 0x7F12_3456_7000, 9, 3)}
    file.deregister(7)
    assert kernel.registered == {}
    for wrong in (lambda: file.deregister(7), lambda: file.register(6, 4096, 4096, access)):
        with pytest.raises(UverbsError, match="No such file or directory") as error:
            wrong()
        assert error.value.status == errno.ENOENT
    assert "4369" not in repr(made)
    assert "7" not in repr(made)


def test_domains_are_listed(kernel: Kernel) -> None:
    assert UverbsFile(3).domains() == set(DOMAINS)


def test_a_driver_that_nobody_knows(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uverbs, "_DRIVERS", RXE)
    with pytest.raises(RdmaError, match="driver is unknown"):
        UverbsFile(3)


def test_other_files_are_refused() -> None:
    for name in ("/dev/null", "/proc/self/status"):
        descriptor = os.open(name, os.O_RDONLY)
        assert not is_uverbs(descriptor)
        with pytest.raises(RdmaError, match="no RDMA device's file"):
            UverbsFile(descriptor)
        os.close(descriptor)


def test_a_kernel_without_such_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/null knows no ioctl at all."""
    monkeypatch.setattr(uverbs, "is_uverbs", lambda descriptor: True)
    descriptor = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(UverbsError, match="take such calls"):
        UverbsFile(descriptor)
    os.close(descriptor)
