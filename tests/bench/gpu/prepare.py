"""Compiles this repository's C++ parts in place, where there is a compiler: `python -m tests.bench.gpu.prepare`.

For machines on which nothing can be installed; `make install` does it everywhere else. Does nothing when what is there
was built from the same sources for the same interpreter.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
STAMP = ROOT / "build" / "in-place.sha256"
SOURCES = ("dpu_service", "gpu_runtime", "proto")


def libraries() -> list[Path]:
    """What has to be there, by `pyproject.toml`."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    names = [line.split('"')[1] for line in lines if line.startswith('name = "') and "._" in line]
    return [ROOT / f"{name.replace('.', '/')}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in names]


def key() -> str:
    """Changes with the sources, the way of building them, and the interpreter."""
    digest = hashlib.sha256(sys.version.encode() + (ROOT / "pyproject.toml").read_bytes())
    for folder in SOURCES:
        for path in sorted([*(ROOT / folder).rglob("*.cpp"), *(ROOT / folder).rglob("*.h")]):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def is_current() -> bool:
    """Nothing has to be done."""
    built = all(library.is_file() for library in libraries())
    return built and STAMP.is_file() and STAMP.read_text(encoding="utf-8") == key()


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
        status = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *options], cwd=ROOT).returncode
    if status == 0:
        STAMP.parent.mkdir(exist_ok=True)
        STAMP.write_text(key(), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
