"""Starts, watches and stops the process of a chain."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from gpu_runtime.chain.spec import ChainSpec
from gpu_runtime.mailbox import Mailbox
from gpu_runtime.scheduler import layout

Progress = Callable[[int, int, str], None]

log = logging.getLogger(__name__)

LET_GO_SECONDS = 30.0
"""For devices that may take seconds for each front end; one that hangs must not keep the process."""
STOP_SECONDS = 30.0
"""How long a stopped chain may take to finish its step before it is killed."""


_MODULES = {"cpu": "gpu_runtime.chain.soft", "cuda": "gpu_runtime.chain.cuda"}

OPENMP_SPINS = "2000"
"""Turns that an idle OpenMP thread spins before it sleeps (read by libgomp when it loads).

libgomp's own default spins for milliseconds and so takes the core from whoever the others wait for: beside another busy
process a step then takes several times as long. On quiet cores 1,000 to 20,000 turns and the default were alike.
"""


class ChainError(RuntimeError):
    """The chain did not start, or ended by itself."""


class ChainProcess:
    """One life of the chain."""

    def __init__(self, process: asyncio.subprocess.Process, mailbox: Mailbox) -> None:
        self._process = process
        self.mailbox = mailbox
        self._stderr = asyncio.ensure_future(self._collect_stderr())

    @classmethod
    async def start(
        cls, device: str, make_spec: Callable[[int], ChainSpec], inherited: Sequence[int] = ()
    ) -> ChainProcess:
        """Starts the process for a device.

        Args:
            make_spec: gets the descriptor of the process's mailbox.
            inherited: other descriptors that the process gets.
        """
        mailbox = Mailbox()
        # Modules are looked up in this process's own path, not in its working directory's.
        environment = {
            "GOMP_SPINCOUNT": OPENMP_SPINS,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULES[device],
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(mailbox.descriptor, *inherited),
            env=environment,
        )
        assert process.stdin is not None
        process.stdin.write(make_spec(mailbox.descriptor).to_json())
        process.stdin.close()
        return cls(process, mailbox)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """The process is gone."""
        return self._process.returncode is not None

    async def wait_ready(self, progress: Progress) -> None:
        """Waits until the chain takes submissions.

        Raises:
            ChainError: it ended instead.
        """
        while not self.mailbox.ready:
            if self.ended:
                raise ChainError(await self.failure())
            self._tell(progress)
            await asyncio.sleep(0.05)
        self._tell(progress)

    def _tell(self, progress: Progress) -> None:
        done, total = self.mailbox.progress
        progress(done, total, "loading and warming up" if total else "starting the chain")

    async def wait(self) -> int:
        """Waits for the end of the process; its exit status."""
        return await self._process.wait()

    async def failure(self) -> str:
        """What the process said before it ended."""
        status = await self._process.wait()
        said = (await self._stderr).strip().splitlines() or ["no message"]
        reasons = [line for line in said if line.startswith("device error:")]
        return f"the chain ended with status {status}: {(reasons or said)[-1]}"

    async def stop(self, let_go: Callable[[], Awaitable[None]] | None = None) -> None:
        """Ends the chain at its next step boundary.

        Args:
            let_go: called when nothing runs on the device any more, and before its process gives memory up; a process
                that does not come to that is killed before. It gets `LET_GO_SECONDS`.
        """
        self.mailbox.command = layout.Command.STOP
        deadline = time.monotonic() + STOP_SECONDS
        while not self.ended and not self.mailbox.halted and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if not self.ended and not self.mailbox.halted:
            self._process.kill()
            await self._process.wait()
        try:
            if let_go is not None:
                await asyncio.wait_for(let_go(), LET_GO_SECONDS)
        except TimeoutError:
            log.error("front ends were not shut out within %.0f s: the chain ends without that", LET_GO_SECONDS)
        finally:
            await self._end()

    async def _end(self) -> None:
        """Waits for the process, which has been told to end."""
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _collect_stderr(self) -> str:
        """Keeps the last lines; passes them on, so that an operator sees them."""
        assert self._process.stderr is not None
        tail: list[str] = []
        async for line in self._process.stderr:
            text = line.decode(errors="replace")
            sys.stderr.write(text)
            tail = [*tail[-20:], text]
        return "".join(tail)
