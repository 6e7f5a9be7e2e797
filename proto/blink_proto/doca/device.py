"""Finding and opening a network device."""

from __future__ import annotations

from ctypes import POINTER, byref, c_uint32, c_void_p, create_string_buffer
from typing import Any

from blink_proto.doca.addresses import gid_index_of
from blink_proto.doca.constants import Status
from blink_proto.doca.errors import DocaUnavailableError
from blink_proto.doca.library import DocaLibrary
from blink_proto.doca.settings import DocaSettings
from blink_proto.rdma.binding import RdmaError, refuse_reordering
from blink_proto.rdma.gids import gid_of

_NAMES = {
    "doca_devinfo_get_ibdev_name": (64,),
    "doca_devinfo_get_iface_name": (256,),
    "doca_devinfo_get_pci_addr_str": (),
}
_ABILITIES = ("doca_rdma_cap_task_write_is_supported", "doca_rdma_cap_task_read_is_supported")


class Device:
    """An open device: the one that the settings name, or the first one with their address.

    `gid_index`: of the address in its table, None without an address.

    Raises:
        DocaUnavailableError: there is no such device (it says what there is), or this process has relaxed ordering on.
        DocaError: it cannot be opened.
    """

    def __init__(self, library: DocaLibrary, settings: DocaSettings) -> None:
        self._library = library
        gid = _asked_for(settings)
        devices, count = POINTER(c_void_p)(), c_uint32()
        library.call("doca_devinfo_create_list", byref(devices), byref(count))
        try:
            info, self.gid_index = _choose(library, [devices[i] for i in range(count.value)], settings, gid)
            self.handle = library.make("doca_dev_open", info)
        finally:
            library.call("doca_devinfo_destroy_list", devices)

    def close(self) -> None:
        """Closes it; everything made on it is gone before.

        Raises:
            DocaError: something still uses it.
        """
        self._library.call("doca_dev_close", self.handle)


def _asked_for(settings: DocaSettings) -> bytes | None:
    """The entry of an address table that is looked for."""
    try:
        refuse_reordering()
        return gid_of(settings.address) if settings.address else None
    except RdmaError as error:
        raise DocaUnavailableError(str(error)) from error


def _choose(
    library: DocaLibrary, infos: list[Any], settings: DocaSettings, gid: bytes | None
) -> tuple[Any, int | None]:
    seen: list[str] = []
    for info in infos:
        names = _names_of(library, info)
        able = all(library.function(ability)(info) == Status.SUCCESS for ability in _ABILITIES)
        index = gid_index_of(library, info, names[0], gid) if able and gid and names else None
        if able and (settings.device in names or not settings.device) and (index is not None or not gid):
            return info, index
        seen.append("/".join(names) + ("" if able else " (no RDMA writes and reads)"))
    wanted = [f"called {settings.device!r}"] if settings.device else []
    wanted += [f"with the RoCE v2 address {settings.address}"] if settings.address else []
    what = " and ".join(wanted) or "that can do RDMA writes and reads"
    raise DocaUnavailableError(f"DOCA has no device {what}; it has: {', '.join(seen) or 'none'}")


def _names_of(library: DocaLibrary, info: Any) -> list[str]:
    names = []
    for function, size in _NAMES.items():
        text = create_string_buffer(256)
        if library.function(function)(info, text, *size) == Status.SUCCESS and text.value:
            names.append(text.value.decode(errors="replace"))
    return names
