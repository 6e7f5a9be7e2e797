"""Emulated machines with Soft-RoCE. What a guest sees of this machine's files it cannot change.

Emulation is by QEMU's TCG alone, so nothing of the host's processor or kernel is needed. One virtual core each: two
processes that spin on two virtual cores starve the kernel thread that does Soft-RoCE's work.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.rdma.foreign import arm64_folder
from tests.rdma.image import ROOT, amd64_folder

_KERNEL_WORDS = (
    "quiet panic=-1 mitigations=off nokaslr audit=0 random.trust_cpu=on cryptomgr.notests tsc=reliable no_timer_check"
)
_ENVIRONMENT = """\
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH={source}:{source}/proto:{source}/deploy:/mnt/site PYTHON={python}
cd {source}
"""


@dataclass(frozen=True)
class Machine:
    """A kind of guest.

    `folder` has its kernel and initrd, `root` is what it finds as /, and `shares` are folders that it finds as
    /mnt/NAME. All of it is read-only. `source`: where in the guest this repository is.
    """

    processor: list[str]
    console: str
    folder: Path
    root: Path
    python: str
    source: Path
    memory: int = 512
    shares: dict[str, Path] = field(default_factory=dict)

    def command(self, out: Path, devices: list[str]) -> list[str]:
        """QEMU's."""
        words = f"console={self.console} {_KERNEL_WORDS} guest.shares={','.join(self.shares)}"
        made = [
            *self.processor,
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
            "-serial",
            "stdio",
            "-monitor",
            "none",
        ]
        made += ["-accel", "tcg,thread=multi", "-smp", "1", "-m", str(self.memory)]
        made += ["-kernel", str(self.folder / "kernel"), "-initrd", str(self.folder / "initrd"), "-append", words]
        made += ["-device", "virtio-rng-pci"]
        for name, path, rights in [
            ("host", self.root, ",readonly=on"),
            ("out", out, ""),
            *((name, path, ",readonly=on") for name, path in self.shares.items()),
        ]:
            made += ["-fsdev", f"local,id={name},path={path},security_model=none,multidevs=remap{rights}"]
            made += ["-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
        return made + devices


def amd64(memory: int = 512) -> Machine:
    """One that sees this machine's files at their own places."""
    processor = ["qemu-system-x86_64", "-M", "q35", "-cpu", "max"]
    return Machine(processor, "ttyS0", amd64_folder(), Path("/"), sys.executable, ROOT, memory)


def arm64(memory: int = 512, **shares: Path) -> Machine:
    """One with a Debian of its own, as on a DPU. The core is near to that of a BlueField-3, which QEMU 7.2 lacks."""
    folder = arm64_folder()
    processor = ["qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a76"]
    found = {"source": ROOT, "site": folder / "site", **shares}
    source = Path("/mnt/source")
    return Machine(processor, "ttyAMA0", folder, folder / "root", "/usr/bin/python3", source, memory, found)


class Guest:
    """A running machine, doing one thing. What it says goes to `log`; `out` is its /mnt/out."""

    def __init__(self, machine: Machine, script: str, devices: list[str] | None = None) -> None:
        self.out = Path(tempfile.mkdtemp(prefix="blink-guest-"))
        head = _ENVIRONMENT.format(source=machine.source, python=machine.python)
        (self.out / "run.sh").write_text(head + script + "\n")
        self.log = self.out / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                machine.command(self.out, devices or []), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def running(self) -> bool:
        """The machine is on."""
        return self._process.poll() is None

    def said(self) -> str:
        """Everything so far."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Waits until it has switched itself off; the script's exit status.

        Raises:
            AssertionError: it did not, or the guest died before it could tell.
        """
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the guest did not end in {seconds:.0f} s:\n{self.said()[-6000:]}") from None
        status = self.out / "status"
        assert status.exists(), f"the guest died:\n{self.said()[-6000:]}"
        return int(status.read_text())

    def wait_for(self, words: str, seconds: float) -> None:
        """Waits until it says something.

        Raises:
            AssertionError: it did not, or ended.
        """
        end = time.monotonic() + seconds
        while words not in self.said():
            given_up = not self.running or time.monotonic() > end
            assert not given_up, f"no {words!r} from the guest:\n{self.said()[-6000:]}"
            time.sleep(0.2)

    def stop(self) -> None:
        """Switches it off and forgets what it left."""
        if self.running:
            self._process.terminate()
            self._process.wait(10)
        shutil.rmtree(self.out, ignore_errors=True)


def cable(socket: Path, *, server: bool, number: int) -> list[str]:
    """One end of a network cable between two guests; `number` tells their cards apart."""
    wire = f"stream,id=cable,addr.type=unix,addr.path={socket},server={'on' if server else 'off'}"
    return ["-netdev", wire, "-device", f"virtio-net-pci,netdev=cable,mac=52:54:00:00:00:0{number},romfile="]


def door(port: int, guest_port: int) -> list[str]:
    """A card whose 10.0.2.15:guest_port is this machine's loopback port; nothing else goes in or out."""
    wire = f"user,id=door,restrict=on,hostfwd=tcp:127.0.0.1:{port}-10.0.2.15:{guest_port}"
    return ["-netdev", wire, "-device", "virtio-net-pci,netdev=door,mac=52:54:00:00:01:01,romfile="]
