"""The functions of DOCA that are called, with their C types.

`union doca_data` (a pointer or a u64) goes by value; an eight-byte union is one integer register in the calling
conventions of x86-64 and of 64-bit Arm, so it is declared as a u64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

_OUT = POINTER(c_void_p)
_DATA = c_uint64
_BLOB = (_OUT, POINTER(c_size_t))

TaskDone = CFUNCTYPE(None, c_void_p, _DATA, _DATA)
"""(task, task's data, context's data)"""
ConnectionRequested = CFUNCTYPE(None, c_void_p, _DATA)
"""(connection, context's data)"""
ConnectionEvent = CFUNCTYPE(None, c_void_p, _DATA, _DATA)
"""(connection, connection's data, context's data)"""

_TASK_INIT = (c_void_p, c_void_p, c_void_p, c_void_p, _DATA, _OUT)
_TASK_CONF = (c_void_p, TaskDone, TaskDone, c_uint32)

COMMON: dict[str, Sequence[Any]] = {
    "doca_version_runtime": (),
    "doca_error_get_name": (c_int,),
    "doca_error_get_descr": (c_int,),
    "doca_devinfo_create_list": (POINTER(POINTER(c_void_p)), POINTER(c_uint32)),
    "doca_devinfo_destroy_list": (POINTER(c_void_p),),
    "doca_devinfo_get_ibdev_name": (c_void_p, c_char_p, c_uint32),
    "doca_devinfo_get_iface_name": (c_void_p, c_char_p, c_uint32),
    "doca_devinfo_get_pci_addr_str": (c_void_p, c_char_p),
    "doca_dev_open": (c_void_p, _OUT),
    "doca_dev_close": (c_void_p,),
    "doca_pe_create": (_OUT,),
    "doca_pe_destroy": (c_void_p,),
    "doca_pe_progress": (c_void_p,),
    "doca_pe_connect_ctx": (c_void_p, c_void_p),
    "doca_pe_get_notification_handle": (c_void_p, POINTER(c_int)),
    "doca_pe_request_notification": (c_void_p,),
    "doca_pe_clear_notification": (c_void_p, c_int),
    "doca_task_submit": (c_void_p,),
    "doca_task_free": (c_void_p,),
    "doca_task_get_status": (c_void_p,),
    "doca_ctx_start": (c_void_p,),
    "doca_ctx_stop": (c_void_p,),
    "doca_ctx_get_state": (c_void_p, POINTER(c_int)),
    "doca_ctx_set_user_data": (c_void_p, _DATA),
    "doca_mmap_create": (_OUT,),
    "doca_mmap_destroy": (c_void_p,),
    "doca_mmap_set_memrange": (c_void_p, c_void_p, c_size_t),
    "doca_mmap_set_dmabuf_memrange": (c_void_p, c_int, c_void_p, c_size_t, c_size_t),
    "doca_mmap_set_permissions": (c_void_p, c_uint32),
    "doca_mmap_add_dev": (c_void_p, c_void_p),
    "doca_mmap_start": (c_void_p,),
    "doca_mmap_export_rdma": (c_void_p, c_void_p, *_BLOB),
    "doca_mmap_create_from_export": (POINTER(_DATA), c_char_p, c_size_t, c_void_p, _OUT),
    "doca_mmap_get_memrange": (c_void_p, *_BLOB),
    "doca_buf_inventory_create": (c_size_t, _OUT),
    "doca_buf_inventory_destroy": (c_void_p,),
    "doca_buf_inventory_start": (c_void_p,),
    "doca_buf_inventory_stop": (c_void_p,),
    "doca_buf_inventory_buf_get_by_args": (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, _OUT),
    "doca_buf_set_data": (c_void_p, c_void_p, c_size_t),
    "doca_buf_dec_refcount": (c_void_p, POINTER(c_uint16)),
}

RDMA: dict[str, Sequence[Any]] = {
    "doca_rdma_cap_task_write_is_supported": (c_void_p,),
    "doca_rdma_cap_task_read_is_supported": (c_void_p,),
    "doca_rdma_cap_get_gid_table_size": (c_void_p, POINTER(c_uint32)),
    "doca_rdma_cap_get_gid": (c_void_p, c_uint32, c_uint32, c_char_p),
    "doca_rdma_create": (c_void_p, _OUT),
    "doca_rdma_destroy": (c_void_p,),
    "doca_rdma_as_ctx": (c_void_p,),
    "doca_rdma_set_permissions": (c_void_p, c_uint32),
    "doca_rdma_set_gid_index": (c_void_p, c_uint32),
    "doca_rdma_set_transport_type": (c_void_p, c_int),
    "doca_rdma_set_send_queue_size": (c_void_p, c_uint32),
    "doca_rdma_set_max_num_connections": (c_void_p, c_uint16),
    "doca_rdma_set_connection_state_callbacks": (
        c_void_p,
        ConnectionRequested,
        ConnectionEvent,
        ConnectionEvent,
        ConnectionEvent,
    ),
    "doca_rdma_export": (c_void_p, *_BLOB, _OUT),
    "doca_rdma_connect": (c_void_p, c_char_p, c_size_t, c_void_p),
    "doca_rdma_task_write_set_conf": _TASK_CONF,
    "doca_rdma_task_write_allocate_init": _TASK_INIT,
    "doca_rdma_task_write_as_task": (c_void_p,),
    "doca_rdma_task_write_set_src_buf": (c_void_p, c_void_p),
    "doca_rdma_task_write_set_dst_buf": (c_void_p, c_void_p),
    "doca_rdma_task_read_set_conf": _TASK_CONF,
    "doca_rdma_task_read_allocate_init": _TASK_INIT,
    "doca_rdma_task_read_as_task": (c_void_p,),
    "doca_rdma_task_read_set_src_buf": (c_void_p, c_void_p),
    "doca_rdma_task_read_set_dst_buf": (c_void_p, c_void_p),
}

RESULTS: dict[str, Any] = {
    "doca_version_runtime": c_char_p,
    "doca_error_get_name": c_char_p,
    "doca_error_get_descr": c_char_p,
    "doca_pe_progress": c_uint8,
    "doca_task_free": None,
    "doca_rdma_as_ctx": c_void_p,
    "doca_rdma_task_write_as_task": c_void_p,
    "doca_rdma_task_read_as_task": c_void_p,
    "doca_rdma_task_write_set_src_buf": None,
    "doca_rdma_task_write_set_dst_buf": None,
    "doca_rdma_task_read_set_src_buf": None,
    "doca_rdma_task_read_set_dst_buf": None,
}
"""Of the functions that do not return a `doca_error_t`."""

assert ctypes.sizeof(_DATA) == ctypes.sizeof(c_void_p)
