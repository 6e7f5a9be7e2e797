"""Makes what a guest boots: a Debian kernel with Soft-RoCE, and an initramfs of busybox and the modules.

`python -m tests.rdma.image FOLDER` makes FOLDER/kernel and FOLDER/initrd. The kernel package is downloaded and
unpacked, not installed. Needs apt-get, dpkg-deb, modinfo, cpio, zstd, xz and a static busybox.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
INIT = HERE / "vm" / "init"
MODULES = ["virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay", "dummy", "crc32_generic", "veth", "rdma_rxe"]
_PARTS = ["./boot/vmlinuz*", "*lib/modules/*/modules.*"]
_PARTS += [f"*/kernel/{name}/*" for name in ("drivers/infiniband", "drivers/virtio", "net", "fs", "lib", "crypto")]
_PARTS += ["*/kernel/drivers/net/[a-z]*.ko*"]


def cache_folder() -> Path:
    """Of all that guests are made of."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blink" / "rdma-guest"


def fetch(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Runs what downloads something; its output. Skips the test where that cannot be had."""
    try:
        ran = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no message"]
        pytest.skip(f"what guests are made of cannot be fetched: {' '.join(command[:3])} …: {said[-1]}")
    return ran.stdout


def amd64_folder() -> Path:
    """A folder with kernel and initrd, made on the first use."""
    key = hashlib.sha256(Path(__file__).read_bytes() + INIT.read_bytes()).hexdigest()[:12]
    folder = cache_folder() / f"amd64-{key}"
    if not (folder / "initrd").exists():
        make_image(folder, "amd64", Path("/bin/busybox"), dict(os.environ))
    return folder


def make_image(folder: Path, architecture: str, busybox: Path, apt: dict[str, str]) -> None:
    """Both files, whole or not at all. `apt`: the environment in which apt finds the architecture's packages."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unpacked = Path(scratch) / "kernel"
        unpacked.mkdir()
        unpack(download(f"linux-image-{architecture}", Path(scratch), apt), unpacked)
        (image,) = unpacked.glob("boot/vmlinuz*")
        (Path(scratch) / "boots").write_bytes(uncompressed(image.read_bytes()))
        make_initrd(Path(scratch) / "initrd", unpacked, busybox, Path(scratch) / "tree")
        (Path(scratch) / "boots").rename(folder / "kernel")
        (Path(scratch) / "initrd").rename(folder / "initrd")


def download(meta_package: str, folder: Path, apt: dict[str, str]) -> Path:
    """The kernel package that a meta package depends on."""
    asked = fetch("apt-cache", "depends", meta_package, env=apt)
    package = next(line.split()[1] for line in asked.splitlines() if "Depends:" in line)
    fetch("apt-get", "-qq", "download", package, cwd=folder, env=apt)
    (found,) = folder.glob(f"{package}_*.deb")
    return found


def unpack(package: Path, folder: Path) -> None:
    """What a guest needs of a kernel package."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as archive:
        command = ["tar", "-x", "-C", str(folder), "--wildcards", *_PARTS]
        subprocess.run(command, stdin=archive.stdout, check=True)


def uncompressed(image: bytes) -> bytes:
    """The kernel within an x86 boot image: QEMU starts it by its PVH note and need not unpack it under emulation. An
    image of another architecture as it is. (Linux x86 boot protocol: setup_sects 0x1f1, payload_offset 0x248.)
    """
    if image[0x1FE:0x200] != b"\x55\xaa" or image[0x202:0x206] != b"HdrS":
        return image
    start, size = struct.unpack_from("<II", image, 0x248)
    start += (image[0x1F1] + 1) * 512
    payload = image[start : start + size]
    if payload.startswith(b"\xfd7zXZ\0"):
        kernel = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(payload)
    else:  # zstd; its length stands behind it
        kernel = subprocess.run(["zstd", "-dc"], input=payload[:-4], capture_output=True, check=True).stdout
    if not kernel.startswith(b"\x7fELF"):
        raise RuntimeError("the kernel's compression is unknown")
    return kernel


def make_initrd(target: Path, unpacked: Path, busybox: Path, tree: Path) -> None:
    """Busybox, `init`, the modules, and the order in which they load."""
    for name in ("bin", "mod", "proc", "sys", "dev", "ro", "rw", "new"):
        (tree / name).mkdir(parents=True)
    shutil.copy(busybox, tree / "bin" / "busybox")
    shutil.copy(INIT, tree / "init")
    (tree / "init").chmod(0o755)
    (folder,) = unpacked.glob("**/lib/modules/*")
    order: list[str] = []
    for name in MODULES:
        add_module(name, folder, tree / "mod", order)
    (tree / "mod" / "order").write_text("\n".join(order) + "\n")
    names = subprocess.run(["find", "."], cwd=tree, capture_output=True, check=True).stdout
    archive = subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=tree, input=names, capture_output=True)
    archive.check_returncode()
    target.write_bytes(gzip.compress(archive.stdout, 1))


def add_module(name: str, folder: Path, target: Path, order: list[str]) -> None:
    """A module behind those that it needs; one that is built into the kernel needs nothing."""
    name = name.replace("-", "_")
    if name in order:
        return
    found = [path for path in folder.rglob("*.ko*") if path.name.split(".")[0].replace("-", "_") == name]
    if not found:
        if f"/{name}.ko" in (folder / "modules.builtin").read_text().replace("-", "_"):
            return
        raise RuntimeError(f"the kernel has no module {name}")
    needs = subprocess.run(["modinfo", "-F", "depends", str(found[0])], capture_output=True, text=True, check=True)
    for needed in filter(None, needs.stdout.strip().split(",")):
        add_module(needed, folder, target, order)
    content = found[0].read_bytes()
    (target / f"{name}.ko").write_bytes(lzma.decompress(content) if found[0].suffix == ".xz" else content)
    order.append(name)


if __name__ == "__main__":
    make_image(Path(sys.argv[1]), "amd64", Path("/bin/busybox"), dict(os.environ))
