"""A RoCE address of a device: which entry of its address table it is."""

from __future__ import annotations

from ctypes import byref, c_uint32, create_string_buffer
from pathlib import Path
from typing import Any

from blink_proto.doca.constants import Status
from blink_proto.doca.library import DocaLibrary

SYSFS = Path("/sys/class/infiniband")
_GID_BYTES = 16


def gid_index_of(library: DocaLibrary, info: Any, name: str, gid: bytes) -> int | None:
    """Where a device's table has the entry, None where it has not.

    Each address is there twice, for RoCE v1 and v2. The kernel tells which is which; where that cannot be read it is
    the last one, which is how mlx5 orders them.

    Args:
        info: the device, by the name `name`.
    """
    size = c_uint32()
    if library.function("doca_rdma_cap_get_gid_table_size")(info, byref(size)) != Status.SUCCESS or not size.value:
        return None
    table = create_string_buffer(_GID_BYTES * size.value)
    if library.function("doca_rdma_cap_get_gid")(info, 0, size.value, table) != Status.SUCCESS:
        return None
    entries = [table.raw[_GID_BYTES * i : _GID_BYTES * (i + 1)] for i in range(size.value)]
    places = [i for i, entry in enumerate(entries) if entry == gid]
    kinds = {i: _kind(name, i) for i in places}
    of_v2 = [i for i in places if "v2" in kinds[i]]
    return max(of_v2 or [i for i in places if not kinds[i]], default=None)


def _kind(name: str, index: int) -> str:
    try:
        return (SYSFS / name / "ports" / "1" / "gid_attrs" / "types" / str(index)).read_text().strip()
    except OSError:
        return ""
