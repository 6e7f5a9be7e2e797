"""Plans for the GPU's kernels without a scheduler on the GPU: made by hand, or copied from the host's scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.kernels.gpu.attention_decode import Release
from gpu_runtime.model.config import ModelConfig
from gpu_runtime.model.device_plan import DevicePlan, chunk_tiles_max, decode_tiles_max, words_of
from gpu_runtime.model.gpu_llama import GpuLlama, KVCache
from gpu_runtime.model.gpu_weights import GpuWeights
from gpu_runtime.scheduler import layout
from gpu_runtime.scheduler.host import HostScheduler, Plan
from tests.bench.arena_memory import Memory, make_config

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class PlanSizes:
    """What a device plan has room for."""

    max_running: int
    tokens: int
    slots: int
    columns: int


def empty_plan(sizes: PlanSizes, device: torch.device | str) -> DevicePlan:
    """A plan of nothing."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    running, tile_words = sizes.max_running, words_of(layout.Tile.itemsize)
    return DevicePlan(
        header=zeros(words_of(layout.StepHeader.itemsize)),
        works=zeros(running, words_of(layout.Work.itemsize)),
        rows=zeros(running, words_of(layout.SampleRow.itemsize)),
        decode_tiles=zeros(decode_tiles_max(running), tile_words),
        chunk_tiles=zeros(chunk_tiles_max(sizes.tokens, running), tile_words),
        token_ids=zeros(sizes.tokens),
        positions=zeros(sizes.tokens),
        kv_slots=zeros(sizes.tokens),
        block_table=zeros(sizes.slots, sizes.columns),
        sampled=zeros(running),
    )


def copy_plan(plan: Plan, target: DevicePlan) -> None:
    """Copies a plan; what lies beyond its entries is left as it was."""
    pairs = [
        (np.array(plan.header).reshape(1), target.header),
        (plan.works, target.works),
        (plan.rows, target.rows),
        (plan.decode_tiles, target.decode_tiles),
        (plan.chunk_tiles, target.chunk_tiles),
        (plan.token_ids, target.token_ids),
        (plan.positions, target.positions),
        (plan.kv_slots, target.kv_slots),
        (plan.block_table, target.block_table),
    ]
    for source, tensor in pairs:
        words = torch.from_numpy(np.ascontiguousarray(source).view(np.int32).reshape(-1).copy())
        tensor.view(-1)[: len(words)] = words.to(tensor.device)


def span_for(decodes: NDArray[np.void]) -> int:
    """The smallest multiple of DECODE_TILE_STEP with which the tiles are as few as a plan may have."""
    span, most = layout.DECODE_TILE_STEP, decode_tiles_max(len(decodes))
    while sum(-(-int(context) // span) for context in decodes["context_tokens"]) > most:
        span += layout.DECODE_TILE_STEP
    return span


def tiles_of(wholes: NDArray[np.uint32], piece: int, first_work: int) -> NDArray[np.void]:
    """Tiles of `piece` for works that have so much each, the first of them being work `first_work`."""
    tiles: list[tuple[int, int, int, int]] = []
    for work, whole in enumerate(wholes.tolist(), first_work):
        base, count = len(tiles), -(-whole // piece)
        tiles += [(work, tile * piece, base, count) for tile in range(count)]
    return np.array(tiles, layout.Tile)


class HandPlanner:
    """Plans of any mixture; slot s owns the blocks 1 + s, 1 + s + slots, … so that no sequence's blocks adjoin."""

    def __init__(self, sizes: PlanSizes) -> None:
        self.sizes = sizes
        slots = range(sizes.slots)
        self.table = np.array([[1 + s + sizes.slots * b for b in range(sizes.columns)] for s in slots], np.int32)
        self.lengths = [0] * sizes.slots

    @property
    def blocks(self) -> int:
        """Blocks that the cache needs."""
        return 1 + self.sizes.slots * self.sizes.columns

    def plan(self, pieces: dict[int, list[int]], bucket: int) -> Plan:
        """The next tokens of each slot, and a sample of each slot's last one; decodes must come before chunks."""
        works, rows = np.zeros(len(pieces), layout.Work), np.zeros(len(pieces), layout.SampleRow)
        header = np.zeros((), layout.StepHeader)
        arrays = np.zeros((3, bucket), np.int32)
        start = 0
        for row, (slot, tokens) in enumerate(pieces.items()):
            positions = np.arange(self.lengths[slot], self.lengths[slot] + len(tokens))
            self.lengths[slot] += len(tokens)
            kv_slots = self.table[slot][positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            arrays[:, start : start + len(tokens)] = tokens, positions, kv_slots
            works[row] = (slot, start, len(tokens), self.lengths[slot], row, 0, 0)
            start += len(tokens)
            rows[row]["token_index"], rows[row]["slot"] = start - 1, slot
            rows[row]["position"] = self.lengths[slot]
        decodes = [len(tokens) for tokens in pieces.values()].count(1)
        if any(works["query_tokens"][:decodes] != 1) or start > bucket:
            raise ValueError("decodes must come first, and all tokens within the bucket")
        span = span_for(works[:decodes])
        decode_tiles = tiles_of(works[:decodes]["context_tokens"], span, 0)
        chunk_tiles = tiles_of(works[decodes:]["query_tokens"], layout.CHUNK_TILE, decodes)
        counts = {
            "tokens": start,
            "bucket": bucket,
            "works": len(works),
            "rows": len(rows),
            "decode_works": decodes,
            "decode_tiles": len(decode_tiles),
            "decode_span": span,
            "chunk_tiles": len(chunk_tiles),
        }
        for name, number in counts.items():
            header[name] = number
        return Plan(
            header=header[()],
            token_ids=arrays[0],
            positions=arrays[1],
            kv_slots=arrays[2],
            works=works,
            rows=rows,
            decode_tiles=decode_tiles,
            chunk_tiles=chunk_tiles,
            block_table=self.table,
            **self._no_sampling(len(rows)),
        )

    def _no_sampling(self, rows: int) -> dict[str, NDArray[Any]]:
        """The parts that only sampling reads."""
        slots = self.sizes.slots
        return {
            "history": np.zeros((slots, self.sizes.columns * BLOCK_TOKENS), np.uint32),
            "extras": np.zeros(slots, layout.SampleExtras),
            "bias": np.zeros((slots, arena.MAX_BIAS), layout.BiasEntry),
            "bans": np.zeros((slots, arena.MAX_BAN_WORDS), layout.BanToken),
            "logprobs": np.zeros(rows, layout.RowLogprobs),
        }


class DeviceDriver(HandPlanner):
    """Runs a model by plans made by hand, where its weights are."""

    def __init__(
        self,
        config: ModelConfig,
        weights: GpuWeights,
        sizes: PlanSizes,
        overlap: bool = True,
        fuse: bool = True,
        release: Release = "late",
    ) -> None:
        super().__init__(sizes)
        device = weights.embedding.device
        self.device_plan = empty_plan(sizes, device)
        self._cache = KVCache(config, self.blocks, BLOCK_TOKENS, weights.dtype, device)
        window = sizes.columns * BLOCK_TOKENS
        how = overlap, fuse, release
        self.model = GpuLlama(config, weights, self._cache, window, self.device_plan, sizes.max_running, *how)

    def fill_cache(self) -> None:
        """Random keys and values, for measurements that begin with a context."""
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor.normal_()

    def put(self, pieces: dict[int, list[int]], bucket: int) -> None:
        """Writes the plan alone."""
        copy_plan(self.plan(pieces, bucket), self.device_plan)

    def step(self, pieces: dict[int, list[int]], bucket: int) -> torch.Tensor:
        """Logits of each piece's last token, and after them what the bucket's other rows gave."""
        self.put(pieces, bucket)
        return self.model.forward(bucket, decode_only=all(len(tokens) == 1 for tokens in pieces.values()))


@dataclass(frozen=True)
class Known:
    """A sequence of which all tokens are given beforehand: a prompt, scored or not, and what stands in for sampled
    tokens."""

    tokens: list[int]
    prompt_tokens: int
    scored: bool = False

    @property
    def positions(self) -> range:
        """Of the tokens that have logits."""
        return range(1 if self.scored else self.prompt_tokens, len(self.tokens))


class ScheduledDriver:
    """Runs a model by the host's scheduler, which stands in for the GPU's."""

    def __init__(
        self, config: ModelConfig, weights: GpuWeights, sizes: PlanSizes, buckets: list[int], blocks: int
    ) -> None:
        self._limits = make_config(
            submit_slots=64,
            heap_tokens=1 << 13,
            log_slots=256,
            vocab_size=config.vocab_size,
            max_model_tokens=sizes.columns * BLOCK_TOKENS,
            max_sequences=sizes.slots,
            max_running=sizes.max_running,
            token_budget=sizes.tokens,
            block_tokens=BLOCK_TOKENS,
            blocks=blocks,
            blocks_per_sequence=sizes.columns,
            lease_timeout_ns=10**15,
            eos=[],
            buckets=buckets,
        )
        device = weights.embedding.device
        self._plan = empty_plan(sizes, device)
        cache = KVCache(config, blocks, BLOCK_TOKENS, weights.dtype, device)
        window = sizes.columns * BLOCK_TOKENS
        self._model = GpuLlama(config, weights, cache, window, self._plan, sizes.max_running)
        self.steps: list[tuple[int, int, int]] = []
        """(bucket, decodes, chunks) of every step."""

    def run(self, sequences: list[Known]) -> dict[tuple[int, int], torch.Tensor]:
        """Logits by (sequence, position of the token that they would sample)."""
        memory = Memory(self._limits)
        scheduler = HostScheduler(self._limits, memory.inbound, memory.outbound)
        control, out = memory.control[0], memory.out[0]
        control["lease"] = 1
        scheduler.step([], 1)
        self._submit(memory, sequences)
        found: dict[tuple[int, int], torch.Tensor] = {}
        sampled: list[int] = []
        for now in count(2):
            plan = scheduler.step(sampled, now)
            control["log_read"] = out["log_written"]
            if not plan.tokens:
                return found
            sampled = self._step(plan, sequences, found)
        raise AssertionError("unreachable")

    def _submit(self, memory: Memory, sequences: list[Known]) -> None:
        offset = 0
        for record, sequence in zip(memory.submit[0], sequences, strict=False):
            prompt = sequence.tokens[: sequence.prompt_tokens]
            memory.heap[0][offset : offset + len(prompt)] = prompt
            record["prompt_offset"], record["prompt_tokens"], record["top_p"] = offset, len(prompt), 1.0
            record["max_tokens"] = len(sequence.tokens) - len(prompt)
            record["flags"] = arena.SubmitFlag.PROMPT_LOGPROBS * sequence.scored
            record["logprobs"] = sequence.scored
            record["commit"] = arena.pack_commit_word(1, 1)
            offset += len(prompt)

    def _step(self, plan: Plan, sequences: list[Known], found: dict[tuple[int, int], torch.Tensor]) -> list[int]:
        copy_plan(plan, self._plan)
        works, decodes = len(plan.works), int(plan.header["decode_works"])
        self.steps.append((int(plan.header["bucket"]), decodes, works - decodes))
        logits = self._model.forward(int(plan.header["bucket"]), decode_only=works == decodes)
        sequence_of = {int(work["slot"]): int(work["position"]) for work in plan.works}
        sampled = []
        for index, row in enumerate(plan.rows):
            sequence, position = sequence_of[int(row["slot"])], int(row["position"])
            found[sequence, position] = logits[index].cpu()
            sampled.append(sequences[sequence].tokens[position])
        return sampled
