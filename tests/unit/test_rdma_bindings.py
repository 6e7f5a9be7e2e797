"""Which package verbs are called by, and what is said where none is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from sysconfig import get_config_var

import pytest

from blink_proto.rdma import binding
from blink_proto.rdma.binding import BindingMissingError, RdmaError, open_device
from blink_proto.rdma.choice import RdmaChoice

LOAD = """
import logging, sys
from pathlib import Path
from blink_proto.rdma.binding import BindingMissingError
from blink_proto.rdma.pyverbs_package import load_pyverbs
logging.getLogger().setLevel(logging.ERROR)
sys.path[:] = [one for one in sys.path if "dist-packages" not in one]
try:
    print("loaded", load_pyverbs(Path(sys.argv[1])).qp.QP.__name__)
except BindingMissingError as error:
    print(error)
print(logging.getLogger().handlers, logging.getLogger().level)
"""


def loaded_from(folder: Path) -> list[str]:
    """What comes of it in a process of its own, and how logging is set up afterwards."""
    ran = subprocess.run([sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, env=os.environ)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_the_systems_pyverbs_is_found_and_leaves_logging_alone() -> None:
    system = Path("/usr/lib/python3/dist-packages")
    if not (system / "pyverbs" / f"device{get_config_var('EXT_SUFFIX')}").exists():
        pytest.skip("python3-pyverbs is not installed for this Python")
    assert loaded_from(system) == ["loaded QP", "[] 40"]


def test_no_pyverbs_or_one_for_another_python_or_a_broken_one(tmp_path: Path) -> None:
    (said, logging) = loaded_from(tmp_path)
    assert said == "pyverbs cannot be loaded (No module named 'pyverbs')"
    assert logging == "[] 40"
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs" / "__init__.py").touch()
    (tmp_path / "pyverbs" / "device.cpython-27-x86_64-linux-gnu.so").touch()
    assert "was built for another Python than this one" in loaded_from(tmp_path)[0]
    (tmp_path / "pyverbs" / f"device{get_config_var('EXT_SUFFIX')}").touch()
    assert loaded_from(tmp_path)[0].startswith("pyverbs cannot be loaded (")


def test_the_first_package_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(name: str, address: str) -> object:
        asked.append("first")
        raise BindingMissingError("first is not here")

    def broken(name: str, address: str) -> object:
        asked.append("second")
        raise RdmaError("no RDMA device has the address 10.9.0.1")

    monkeypatch.setattr(binding, "OPENERS", {"first": missing, "second": broken, "third": missing})
    with pytest.raises(RdmaError, match="no RDMA device has the address"):
        open_device("", "10.9.0.1", ("first", "second", "third"))
    assert asked == ["first", "second"]
    with pytest.raises(BindingMissingError, match="first is not here; first is not here"):
        open_device("", "10.9.0.1", ("first", "third"))
    with pytest.raises(RdmaError, match="no binding to verbs named 'fourth'"):
        open_device("", "10.9.0.1", ("fourth",))


def test_what_auto_means() -> None:
    assert RdmaChoice("", "10.9.0.1").bindings == ("pyverbs", "ibverbs")
    assert RdmaChoice("", "10.9.0.1", "ibverbs").bindings == ("ibverbs",)


def test_reordering_that_the_process_asks_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX5_RELAXED_PACKET_ORDERING_ON", "1")
    with pytest.raises(RdmaError, match="relaxed ordering breaks the arena's contract"):
        open_device("", "10.9.0.1")
