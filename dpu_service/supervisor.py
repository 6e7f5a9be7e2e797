"""The supervisor: binds the sockets once, keeps the workers running, hands them sessions, and drains them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import multiprocess

from blink_proto.dial import Dial
from dpu_service.config import WorkerConfig
from dpu_service.identity import Identities
from dpu_service.routing.prefixes import create as create_prefixes
from dpu_service.runtime_link import RuntimeLink
from dpu_service.tenants.file import KeysFile
from dpu_service.tenants.page import CounterPage, create
from dpu_service.transport.base import TransportError
from dpu_service.transport.choose import WITHOUT_OFFER
from dpu_service.watch import LOOK_SECONDS, FileWatch
from dpu_service.wire import (
    Broken,
    Drain,
    ListenerSpec,
    MakeOffer,
    Offer,
    Session,
    Start,
    Status,
    Tenants,
    encode,
    read_from_worker,
)

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.2
LONGEST_BACKOFF = 5.0
SETTLED_SECONDS = 30.0
"""A worker that lived this long is restarted without delay."""
UNSENT_BYTES = 128 << 10
OFFER_SECONDS = 30.0
"""A worker that was just started first has to come up."""
OVERTIME_SECONDS = 5.0
"""What a worker may take beyond the grace time before it is killed."""


@dataclass(frozen=True)
class Listening:
    """A bound socket and how to reach it."""

    sock: socket.socket
    tls: bool

    @property
    def url(self) -> str:
        """With the actual port."""
        host, port = self.sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.tls else 'http'}://{shown}:{port}"


def listen(host: str, port: int, *, tls: bool) -> Listening:
    """Binds an address.

    Raises:
        OSError: it is taken or not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # inherited; finds clients that vanished
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # inherited; what a client does not read must not pile up in the kernel
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.bind(address)
    sock.listen(2048)
    sock.set_inheritable(True)
    return Listening(sock, tls)


class WorkerSlot:
    """One worker's place: the process in it is replaced when it dies."""

    def __init__(
        self,
        index: int,
        start: Start,
        environment: dict[str, str],
        on_change: Callable[[], None],
        on_death: Callable[[int], None],
        on_broken: Callable[[int, int], None],
    ) -> None:
        self.index = index
        self.ready = False
        self.alive = [False] * start.runtimes
        self._start = start
        self._environment = environment
        self._on_change = on_change
        self._on_death = on_death
        self._on_broken = on_broken
        self._offers: dict[int, asyncio.Future[Offer]] = {}
        self._asked = 0
        self._sessions: dict[int, Session] = {}
        self._tenants: Tenants | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._draining = False

    async def keep(self) -> None:
        """Runs workers one after the other until drained."""
        backoff = FIRST_BACKOFF
        while not self._draining:
            began = time.monotonic()
            code = await self._one_life()
            if self._draining:
                return
            backoff = FIRST_BACKOFF if time.monotonic() - began > SETTLED_SECONDS else backoff
            log.error("a worker died", extra={"fields": {"worker": self.index, "status": code, "again_in": backoff}})
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    async def make_offer(self, runtime: int) -> bytes:
        """The worker's end of a new connection to a runtime.

        Raises:
            TransportError: it cannot make one, or does not answer.
        """
        if self._start.config.transport in WITHOUT_OFFER:
            return b""
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._offers[number] = answer
        try:
            async with asyncio.timeout(OFFER_SECONDS):
                while self._writer is None:
                    await asyncio.sleep(0.05)
                self._writer.write(encode(MakeOffer(number, runtime)))
                offer = await answer
        except TimeoutError:
            raise TransportError("a worker did not say how it can be reached") from None
        finally:
            del self._offers[number]
        if offer.error:
            raise TransportError(offer.error)
        return offer.offer

    def give_session(self, session: Session) -> None:
        """For the present worker and, where it is not bound to its offer, for those after it."""
        self._sessions.pop(session.runtime, None)
        if session.transport in WITHOUT_OFFER:
            self._sessions[session.runtime] = session
        if self._writer is not None:
            self._writer.write(encode(session))

    def give_tenants(self, tenants: Tenants) -> None:
        """For the present worker and those after it."""
        self._tenants = tenants
        if self._writer is not None:
            self._writer.write(encode(tenants))

    def drain(self, message: Drain) -> None:
        """Tells the worker to finish."""
        self._draining = True
        if self._writer is not None:
            self._writer.write(encode(message))

    def kill(self) -> None:
        """Ends the worker at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _one_life(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [spec.descriptor for spec in self._start.listeners]
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dpu_service.worker", str(theirs.fileno())),
                pass_fds=[theirs.fileno(), self._start.counters, self._start.prefixes, *descriptors],
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode(self._start))
        if self._tenants is not None:
            self._writer.write(encode(self._tenants))
        for session in self._sessions.values():
            self._writer.write(encode(session))
        if self._draining:
            self._writer.write(encode(Drain(0)))
        for runtime in range(self._start.runtimes):
            if runtime not in self._sessions:
                self._on_broken(runtime, self.index)
        try:
            await self._listen(reader)
            return await self._process.wait()
        finally:
            self._writer.close()
            self._writer = None
            self._on_death(self.index)
            multiprocess.mark_process_dead(self._process.pid, self._environment["PROMETHEUS_MULTIPROC_DIR"])  # type: ignore[no-untyped-call]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while message := await read_from_worker(reader):
            if isinstance(message, Offer):
                self._take_offer(message)
            elif isinstance(message, Broken):
                self._on_broken(message.runtime, self.index)
            else:
                self._note(message)
        self.ready = False
        self.alive = [False] * self._start.runtimes

    def _take_offer(self, offer: Offer) -> None:
        """One that nobody waits for any more came too late."""
        waiting = self._offers.get(offer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(offer)

    def _note(self, status: Status) -> None:
        self.ready, self.alive = status.ready, status.alive
        if not status.ready:
            log.info("worker not ready", extra={"fields": {"worker": self.index, "reason": status.reason}})
        self._on_change()


class Supervisor:
    """Everything that is not in the path of a request.

    Args:
        listening: the bound sockets.
        workers: processes to run.
        runtimes: how to call each runtime's control plane.
        front_end: name in the sessions; empty: this host's and port's own.
        end: how the workers are told to finish.
        on_ready: called once, when all workers are ready for the first time.
        keys: who may use the service; None: everybody.
    """

    def __init__(
        self,
        config: WorkerConfig,
        listening: list[Listening],
        workers: int,
        runtimes: list[Dial],
        front_end: str,
        end: Drain,
        on_ready: Callable[[], None],
        keys: KeysFile | None = None,
    ) -> None:
        self._listening = listening
        self._end = end
        self._on_ready: Callable[[], None] | None = on_ready
        self._metrics = tempfile.mkdtemp(prefix="blink-dpu-metrics-")
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._metrics, "TOKENIZERS_PARALLELISM": "false"}
        specs = [ListenerSpec(one.sock.fileno(), one.tls) for one in listening]
        counters = create(workers)
        self._counters = CounterPage(counters, workers)
        prefixes = create_prefixes(len(runtimes))
        starts = [Start(config, specs, i, workers, counters, len(runtimes), prefixes) for i in range(workers)]
        self._keys = keys
        name = front_end or f"{socket.gethostname()}:{listening[0].sock.getsockname()[1]}"
        identities = Identities()
        self._links = [
            RuntimeLink(
                dial,
                _name_towards(number, name),
                workers,
                config.transport,
                partial(self._make_offer, number),
                self._give_session,
                number,
                identities,
                partial(self._in_use, number),
            )
            for number, dial in enumerate(runtimes)
        ]
        self._slots = [
            WorkerSlot(i, start, environment, self._changed, self._counters.forget_worker, self._renew)
            for i, start in enumerate(starts)
        ]
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT; the second signal ends the grace time."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        tenants = asyncio.create_task(self._follow_keys())
        keepers = [asyncio.create_task(slot.keep()) for slot in self._slots]
        links = [asyncio.create_task(link.follow()) for link in self._links]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*links, stop], return_when=asyncio.FIRST_COMPLETED)
            for link in links:
                if link.done():
                    link.result()
            await self._drain(keepers)
        finally:
            for task in (stop, tenants, *links):
                task.cancel()
            await asyncio.gather(*links, return_exceptions=True)
            for slot in self._slots:
                slot.kill()
            shutil.rmtree(self._metrics, ignore_errors=True)

    async def _drain(self, keepers: list[asyncio.Task[None]]) -> None:
        log.info("draining", extra={"fields": {"grace": self._end.grace}})
        for one in self._listening:
            one.sock.close()
        for slot in self._slots:
            slot.drain(self._end)
        _, late = await asyncio.wait(keepers, timeout=self._end.unready + self._end.grace + OVERTIME_SECONDS)
        for slot in self._slots:
            slot.kill()
        if late:
            log.error("killed workers that did not end", extra={"fields": {"workers": len(late)}})
            await asyncio.wait(late)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            for slot in self._slots:
                slot.kill()
        self._stop.set()

    async def _make_offer(self, runtime: int, worker: int) -> bytes:
        return await self._slots[worker].make_offer(runtime)

    def _renew(self, runtime: int, worker: int) -> None:
        self._links[runtime].renew(worker)

    def _in_use(self, runtime: int) -> bool:
        return any(slot.alive[runtime] for slot in self._slots)

    def _give_session(self, worker: int, session: Session) -> None:
        self._slots[worker].give_session(session)

    async def _follow_keys(self) -> None:
        """A file that cannot be used changes nothing."""
        if self._keys is None:
            return
        watch = FileWatch([self._keys.path])
        changed = True
        while True:
            if changed:
                self._give_tenants(self._keys)
            await asyncio.sleep(LOOK_SECONDS)
            changed = watch.changed()

    def _give_tenants(self, keys: KeysFile) -> None:
        try:
            tenants = keys.read()
        except (OSError, ValueError) as error:
            log.error("kept the old API keys", extra={"fields": {"file": keys.path, "reason": str(error)}})
            return
        log.info("API keys", extra={"fields": {"tenants": len(tenants)}})
        for slot in self._slots:
            slot.give_tenants(Tenants(tenants))

    def _changed(self) -> None:
        if self._on_ready is not None and all(slot.ready for slot in self._slots):
            on_ready, self._on_ready = self._on_ready, None
            on_ready()


def _name_towards(runtime: int, name: str) -> str:
    """Another one for each: were two of them the same runtime, one name's session would revoke the other's."""
    return f"{name[:110]}+{runtime}" if runtime else name[:110]
