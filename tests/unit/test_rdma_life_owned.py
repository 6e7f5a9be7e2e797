"""A CUDA device's memory that only the chain's process can register (nvidia-peermem), over a life of the chain.

As in `test_rdma_life`; what is registered stands in a table that both processes have (`tests/standin/table.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gpu_runtime.chain import process
from gpu_runtime.control.chain_life import ChainLife
from gpu_runtime.control.errors import NotReadyError
from gpu_runtime.registration import memory, peermem
from gpu_runtime.registration.peermem import Asker
from tests.bench.gpu.remote_front import RemoteFront
from tests.standin.adapter import Adapter, RefusedError
from tests.standin.chain import OWNER
from tests.standin.table import Table
from tests.unit.test_rdma_life import Site, adapter, check, play, prepared

__all__ = ["adapter"]


@pytest.fixture
def owned(adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """What is registered with the adapter."""
    made = Table.make()
    adapter.folder, adapter.table = tmp_path, made
    monkeypatch.setenv(OWNER, str(tmp_path))
    monkeypatch.setattr(memory, "Asker", partial(Asker, open_file=Table))
    yield made
    assert not [row for row in made.rows() if row.live], "all of it was given back"
    made.close()
    os.close(made.descriptor)


def live(table: Table) -> int:
    return sum(row.live for row in table.rows())


def test_the_chains_process_registers_and_gives_back(adapter: Adapter, owned: Table, tiny_folder: Path) -> None:
    async def scene(site: Site) -> None:
        (remote, peer), near = await site.remote(), await site.local()
        await check(remote, near)
        listed = {one.front_end: (one.transport, one.gpu_memory) for one in site.life.list_sessions()}
        assert listed == {"dpu": ("verbs", "peermem"), "near": ("shm", "")}
        assert {row.by for row in owned.rows()} == {site.life.chain.pid}
        assert live(owned) == 3
        again, other = await site.remote()
        assert live(owned) == 3
        with pytest.raises(RefusedError):
            peer.get(0, 8)
        assert not {one.key for one in peer.answer.inbound} & {one.key for one in other.answer.inbound}
        await check(again)

    play(adapter, tiny_folder, scene)


def test_a_chains_process_that_is_stopped(
    adapter: Adapter, owned: Table, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No session is opened, and nobody waits long; requests that came too late are not carried out."""

    async def scene(site: Site) -> None:
        front, _ = await site.remote()
        os.kill(site.life.chain.pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(peermem, "ANSWER_SECONDS", 0.2)
                patched.setattr(peermem, "_TO_BEGIN_SECONDS", 0.1)
                began = time.monotonic()
                for name in ("dpu", *["another"] * 20):
                    with pytest.raises(NotReadyError, match="does not answer"):
                        await asyncio.wait_for(site.open(name, "verbs"), 5)
                assert time.monotonic() - began < 3
        finally:
            os.kill(site.life.chain.pid, signal.SIGCONT)
        again = await soon(site)
        await check(again)
        assert again.lease == front.lease + 1

    play(adapter, tiny_folder, scene, "verbs")


async def soon(site: Site) -> RemoteFront:
    """A front end that tries until the chain's process has come to answer."""
    end = time.monotonic() + 10
    while True:
        try:
            front, _ = await site.remote()
        except NotReadyError:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        else:
            return front


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_chains_process_that_dies_or_hangs(
    ending: signal.Signals, adapter: Adapter, owned: Table, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control process then gives back what is registered, and not before that process is gone."""
    monkeypatch.setattr(process, "STOP_SECONDS", 0.5)
    gone: list[bool] = []
    alone = peermem._deregister_alone

    async def scene() -> None:
        life = await ChainLife.begin(prepared(tiny_folder, "verbs"), 1, lambda done, total, what: None)
        await Site(life, adapter).remote()

        def watched(file: object, region: int) -> None:
            gone.append(life.chain.ended and not Path(f"/proc/{life.chain.pid}").exists())
            alone(file, region)  # type: ignore[arg-type]

        monkeypatch.setattr(peermem, "_deregister_alone", watched)
        assert live(owned) == 3
        os.kill(life.chain.pid, ending)
        if ending == signal.SIGKILL:
            await life.chain.wait()
        await life.end()
        assert await life.chain.wait() == -signal.SIGKILL

    asyncio.run(scene())
    assert gone == [True] * 3
    assert adapter.closed
