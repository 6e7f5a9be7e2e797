"""Loads the small C++ helper of the `shm` transport."""

from __future__ import annotations

import ctypes
import sysconfig
from functools import cache
from pathlib import Path


@cache
def shm_library() -> ctypes.PyDLL:
    """The helper. `PyDLL` keeps the interpreter lock: its calls are shorter than handing the lock over.

    Raises:
        OSError: the package was not built.
    """
    folder = Path(__file__).resolve().parent.parent
    names = [f"_shm{sysconfig.get_config_var('EXT_SUFFIX')}", "_shm.so"]
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise OSError(f"{names[0]} is not in {folder}: build the package (pip install -e .)")
    library = ctypes.PyDLL(str(found))
    library.blink_shm_write.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.blink_shm_commit.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    library.blink_shm_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    for function in (library.blink_shm_write, library.blink_shm_commit, library.blink_shm_read):
        function.restype = None
    return library
