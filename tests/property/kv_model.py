"""A KV cache in which every cell remembers what was written to it, to see whether block tables are right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu_runtime.scheduler import host, layout
from tests.property.limits import Limits

Owner = tuple[int, int]
"""(channel, position in the submit ring) of a sequence."""


class KvModel:
    """Plays the step's kernels: writes each token through `kv_slots`, reads its context through the block table.

    What a cell holds depends on its token and on all before it; they are known by a number, the same for the same
    tokens under the same salt.
    """

    def __init__(self, limits: Limits, salt_of: Callable[[Owner], int]) -> None:
        self.limits = limits
        self.salt_of = salt_of
        self.cells: dict[int, int] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.prefixes: dict[Owner, list[int]] = {}
        """Of each sequence, the numbers of its prefixes as far as the model has seen its tokens."""
        self.rows: dict[Owner, list[int]] = {}
        self.slots: dict[Owner, int] = {}

    def run(self, plan: host.Plan) -> None:
        """Runs the plan and checks what every sequence sees."""
        slots, tokens = plan.kv_slots.tolist(), int(plan.header["tokens"])
        assert len(set(slots[:tokens])) == tokens, "two tokens of a step in one cell"
        scratch = layout.SCRATCH_BLOCK * self.limits.block_tokens
        assert all(scratch <= slot < scratch + self.limits.block_tokens for slot in slots[tokens:]), "padding"
        for owner, row in self.rows.items():
            self.rows[owner] = plan.block_table[self.slots[owner]].tolist()[: len(row)]
        for work in plan.works:
            self._see_tokens(plan, work)
            self._see_row(plan, work)
        for work in plan.works:
            self._write(plan, work)
        for work in plan.works:
            self._check_context(work)
        assert len(set(self.slots.values())) == len(self.slots), "a slot of two sequences"

    def _see_tokens(self, plan: host.Plan, work: np.void) -> None:
        owner, context = _owner(work), int(work["context_tokens"])
        numbers = self.prefixes.setdefault(owner, [])
        for token in plan.history[int(work["slot"])].tolist()[len(numbers) : context]:
            before = numbers[-1] if numbers else -1 - self.salt_of(owner)
            numbers.append(self.numbers.setdefault((before, token), len(self.numbers)))

    def _see_row(self, plan: host.Plan, work: np.void) -> None:
        owner, size = _owner(work), self.limits.block_tokens
        row = plan.block_table[int(work["slot"])].tolist()[: -(-int(work["context_tokens"]) // size)]
        assert all(0 < block < self.limits.blocks for block in row), "scratch block or none owned"
        assert len(set(row)) == len(row), "a block twice in a row"
        self.rows[owner] = row
        assert self.slots.setdefault(owner, int(work["slot"])) == int(work["slot"]), "the slot changed"

    def _write(self, plan: host.Plan, work: np.void) -> None:
        owner, query, start = _owner(work), int(work["query_tokens"]), int(work["query_start"])
        first = int(work["context_tokens"]) - query
        assert plan.positions[start : start + query].tolist() == list(range(first, first + query))
        assert (
            plan.token_ids[start : start + query].tolist()
            == plan.history[int(work["slot"])][first : first + query].tolist()
        )
        for index, slot in enumerate(plan.kv_slots[start : start + query].tolist()):
            holders = [each for each, row in self.rows.items() if slot // self.limits.block_tokens in row]
            assert holders == [owner], "a block that another sequence reads is written to"
            self.cells[slot] = self.prefixes[owner][first + index]

    def _check_context(self, work: np.void) -> None:
        owner, size = _owner(work), self.limits.block_tokens
        for position in range(int(work["context_tokens"])):
            cell = self.cells[self.rows[owner][position // size] * size + position % size]
            assert cell == self.prefixes[owner][position], "the cell holds something else"

    def keep_only(self, alive: set[Owner]) -> None:
        """Forgets sequences that have ended."""
        for owner in [each for each in self.rows if each not in alive]:
            del self.rows[owner], self.slots[owner], self.prefixes[owner]


def _owner(work: np.void) -> Owner:
    return int(work["channel"]), int(work["position"])
