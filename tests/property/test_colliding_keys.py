"""Keys decide nothing: with a prefix cache whose keys have two bits no sequence ever reads another prefix's KV.

Without the twin, which has no keys: a search that meets the wrong one of two blocks with the same key and the same
tokens finds less than there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from gpu_runtime.scheduler import host
from gpu_runtime.scheduler.host import HostScheduler
from gpu_runtime.scheduler.layout import RowFlag
from tests.emulation.build import build_emulated
from tests.property.histories import draw_limits
from tests.property.kv_model import KvModel
from tests.property.limits import Inbound, Outbound
from tests.property.worker import Worker, next_in_text

HISTORIES = 150


@pytest.fixture
def colliding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every HostScheduler made meanwhile has such keys."""
    host.use_library(build_emulated("colliding_keys.cpp", tmp_path_factory.mktemp("emulated")))
    yield
    host.use_library(None)


class Scene:
    """One worker that reads all there is, and a model of the KV cache."""

    def __init__(self, rng: Random) -> None:
        seed = rng.getrandbits(64)  # other keys collide each time, those of salts too
        limits = replace(draw_limits(rng.randint), channels=1, log_slots=256, prefix_cache=True, hash_seed=seed)
        self.rng, self.limits = rng, limits
        self.inbound, self.outbound = Inbound(limits.sizes), Outbound(limits.sizes)
        self.core = HostScheduler(limits.record(), self.inbound.bytes, self.outbound.bytes)
        self.worker = Worker(limits, self.inbound, self.outbound, 0)
        self.salts: dict[int, int] = {}
        self.kv = KvModel(limits, lambda owner: self.salts[owner[1]])
        self.sampled: list[int] = []
        self.worker.ask()
        self.step()
        self.worker.after_step()

    def submit(self) -> None:
        """Any valid submission."""
        record = self.worker.good_record(self.rng, long=self.rng.random() < 0.3)
        self.salts[self.worker.submit_position] = int(record["cache_salt"])
        self.worker.submit(record)

    def step(self) -> None:
        """One step, with everything checked and read."""
        plan = self.core.step(np.array(self.sampled, np.int32), 5_000)
        self.core.audit()
        self.worker.read(1 << 30)
        taken = range(self.worker.first_position, self.worker.out("submit_read"))
        ended = {position for position, ledger in self.worker.ledgers.items() if ledger.last is not None}
        self.kv.keep_only({(0, position) for position in taken if position not in ended})
        self.kv.run(plan)
        self.sampled = [self._sample(plan, row) for row in plan.rows]

    def _sample(self, plan: host.Plan, row: np.void) -> int:
        before = plan.history[int(row["slot"])][: int(row["position"])].tolist()
        token = None if row["flags"] & RowFlag.KNOWN else next_in_text(before, self.limits)
        return self.rng.randrange(self.limits.vocab_size) if token is None else token


@pytest.mark.usefixtures("colliding")
def test_no_prefix_is_taken_for_another() -> None:
    hits = 0
    for seed in range(HISTORIES):
        rng = Random(seed)
        scene = Scene(rng)
        try:
            for _ in range(60):
                if rng.random() < 0.5:
                    scene.submit()
                if rng.random() < 0.1:
                    scene.worker.cancel(rng.randrange(1 + scene.worker.submit_position))
                scene.step()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        hits += scene.outbound.telemetry("prefix_hits")
    assert hits > HISTORIES
