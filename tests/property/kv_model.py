"""A KV cache in which every cell remembers what was written to it, to see whether block tables are right."""

from __future__ import annotations

import numpy as np

from gpu_runtime.scheduler import host, layout
from tests.property.limits import Limits

Owner = tuple[int, int]
"""(channel, position in the submit ring) of a sequence."""


class KvModel:
    """Plays the step's kernels: writes each token through `kv_slots`, reads its context through the block table."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cells: dict[int, tuple[Owner, int, int]] = {}
        self.rows: dict[Owner, list[int]] = {}
        self.slots: dict[Owner, int] = {}

    def run(self, plan: host.Plan) -> None:
        """Runs the plan and checks what every sequence sees."""
        slots, tokens = plan.kv_slots.tolist(), int(plan.header["tokens"])
        assert len(set(slots[:tokens])) == tokens, "two tokens of a step in one cell"
        scratch = layout.SCRATCH_BLOCK * self.limits.block_tokens
        assert all(scratch <= slot < scratch + self.limits.block_tokens for slot in slots[tokens:]), "padding"
        ids, positions = plan.token_ids.tolist(), plan.positions.tolist()
        for work in plan.works:
            owner = (int(work["channel"]), int(work["position"]))
            start = int(work["query_start"])
            for index in range(start, start + int(work["query_tokens"])):
                self.cells[slots[index]] = (owner, positions[index], ids[index])
        for work in plan.works:
            self._check_context(plan, work)

    def _check_context(self, plan: host.Plan, work: np.void) -> None:
        owner, context = (int(work["channel"]), int(work["position"])), int(work["context_tokens"])
        size = self.limits.block_tokens
        row = plan.block_table[int(work["slot"])].tolist()[: -(-context // size)]
        assert row[: len(self.rows.get(owner, []))] == self.rows.get(owner, []), "a block was exchanged"
        assert all(0 < block < self.limits.blocks for block in row), "scratch block or none owned"
        self.rows[owner] = row
        assert self.slots.setdefault(owner, int(work["slot"])) == int(work["slot"]), "the slot changed"
        for position in range(context):
            cell = self.cells[row[position // size] * size + position % size]
            assert cell[:2] == (owner, position), "the cell belongs to someone else"

    def keep_only(self, alive: set[Owner]) -> None:
        """Forgets sequences that have ended; the rest must not share a block or a slot."""
        for owner in [each for each in self.rows if each not in alive]:
            del self.rows[owner], self.slots[owner]
        blocks = [block for row in self.rows.values() for block in row]
        assert len(blocks) == len(set(blocks)), "a block in two rows"
        assert len(set(self.slots.values())) == len(self.slots), "a slot of two sequences"
