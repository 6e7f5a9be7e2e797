"""Finds Debian's package `pyverbs` (python3-pyverbs, also DOCA's), from a virtual environment too.

It is compiled for the system's Python and against the machine's own libibverbs. Of PyPI's `pyverbs` nothing is wanted:
it fits no libibverbs but the one it was built with.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from sysconfig import get_config_var
from types import SimpleNamespace
from typing import Any

from blink_proto.rdma.binding import BindingMissingError

SYSTEM_PACKAGES = Path("/usr/lib/python3/dist-packages")
_MODULES = ("addr", "base", "cq", "device", "enums", "mr", "pd", "pyverbs_error", "qp", "wr")
_LOGGERS = ("AH", "CQ", "CompChannel", "Context", "DmaBufMR", "MR", "MW", "PD", "QP")


def load_pyverbs(system: Path = SYSTEM_PACKAGES) -> Any:
    """Its modules by name.

    Raises:
        BindingMissingError: it is not installed, was built for another Python, or does not fit the libibverbs here.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        _make_known(system)
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
    except ImportError as error:
        raise BindingMissingError(f"pyverbs cannot be loaded ({error})") from error
    finally:  # it sets up logging for the whole process
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)
        root.setLevel(level)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    return SimpleNamespace(**modules)


def _make_known(system: Path) -> None:
    """Makes `import pyverbs` find the system's, where it finds none."""
    folder = system / "pyverbs"
    if importlib.util.find_spec("pyverbs") is not None or not folder.is_dir():
        return
    if not (folder / f"device{get_config_var('EXT_SUFFIX')}").exists():
        raise BindingMissingError(f"the pyverbs in {folder} was built for another Python than this one")
    spec = importlib.util.spec_from_file_location(
        "pyverbs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    spec.loader.exec_module(package)
