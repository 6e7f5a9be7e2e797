"""A Debian root for arm64 guests: packages unpacked, not installed, and the wheels that a front end needs.

The host's package sources and keys are used, with a state of its own: the host's dpkg never sees these packages.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.rdma.image import ROOT, cache_folder, fetch, make_image

PACKAGES = "base-files libc6 libstdc++6 bash coreutils mount iproute2 python3 rdma-core libibverbs1 ibverbs-providers"
PACKAGES += " python3-pyverbs"
_PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64")
PYTHON = "3.11"
"""Debian 12's."""


def arm64_folder() -> Path:
    """A folder with kernel, initrd, root and site (the wheels), made on the first use."""
    key = hashlib.sha256(Path(__file__).read_bytes() + "\n".join(requirements()).encode()).hexdigest()[:12]
    folder = cache_folder() / f"arm64-{key}"
    if not (folder / "initrd").exists():
        apt = _apt(folder / "apt")
        _unpack_root(folder, apt)
        _install_wheels(folder / "site")
        make_image(folder, "arm64", folder / "root" / "bin" / "busybox", apt)
    return folder


def requirements() -> list[str]:
    """What the front end is installed with, but for the shared-memory transport's parts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["dpu"], *extras["rdma"]]


def _apt(folder: Path) -> dict[str, str]:
    """The environment in which apt works for arm64 and in this folder."""
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "root",
        "Dir::State": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
    }
    (folder / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    environment = {**os.environ, "APT_CONFIG": str(folder / "apt.conf")}
    fetch("apt-get", "-qq", "update", env=environment)
    return environment


def _unpack_root(folder: Path, apt: dict[str, str]) -> None:
    packages = [*PACKAGES.split(), "busybox-static"]
    fetch("apt-get", "-qq", "-y", "--download-only", "install", *packages, env=apt)
    root = folder / "root"
    for name in ("bin", "sbin", "lib"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    for package in sorted((folder / "apt" / "archives").glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as archive:
            command = ["tar", "-x", "-C", str(root), "--keep-directory-symlink"]
            subprocess.run(command, stdin=archive.stdout, check=True)
        package.unlink()
    for name in ("proc", "sys", "dev", "run", "tmp", "root", "mnt/out", "etc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")


def _install_wheels(site: Path) -> None:
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        *platforms,
    ]
    command += ["--python-version", PYTHON, "--target", str(site), "--no-compile", *requirements()]
    fetch(*command)
