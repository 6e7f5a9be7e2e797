"""Compiles this repository's C++ parts in place, where there is a compiler: `python -m tests.bench.gpu.prepare`.

For machines on which nothing can be installed; `make install` does it everywhere else. Does nothing when the libraries
are newer than their sources.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("dpu_service", "gpu_runtime", "proto")


def is_current() -> bool:
    """Every library is there for this interpreter and newer than every source."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = [line.split('"')[1] for line in text.splitlines() if line.startswith('name = "') and "._" in line]
    libraries = [ROOT / f"{name.replace('.', '/')}{suffix}" for name in names]
    if not all(library.is_file() for library in libraries):
        return False
    found = [path for folder in SOURCES for kind in ("*.cpp", "*.h") for path in (ROOT / folder).rglob(kind)]
    return min(path.stat().st_mtime for path in libraries) > max(path.stat().st_mtime for path in found)


def main() -> int:
    """The compiler's status; 0 where there is no compiler, with a word about it."""
    if is_current():
        return 0
    if shutil.which("g++") is None:
        print("g++ is not installed: what needs the C++ parts will be skipped", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        code = "import setuptools; setuptools.setup()"
        options = ["-q", "build_ext", "--inplace", "--force", "--parallel", "4", "--build-temp", temporary]
        return subprocess.run([sys.executable, "-W", "ignore", "-c", code, *options], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
