"""Runs models without the scheduler: a trivial block allocator and hand-made steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gpu_runtime.kernels.sampling import sample
from gpu_runtime.model.llama import KVCache, LlamaModel
from gpu_runtime.model.source import ModelFolder, open_folder
from gpu_runtime.model.step import StepInputs
from gpu_runtime.model.weights import Weights
from gpu_runtime.scheduler import layout

BLOCK = 16


class Driver:
    """Sequences in slots; slot s owns the blocks 1 + s, 1 + s + slots, … so that no sequence's blocks adjoin."""

    def __init__(self, folder: ModelFolder, slots: int = 8, window: int = 512) -> None:
        columns = -(-window // BLOCK)
        self.table = np.array([[1 + s + slots * b for b in range(columns)] for s in range(slots)], np.int32)
        cache = KVCache(folder.config, 1 + slots * columns, BLOCK)
        self.model = LlamaModel(folder.config, Weights(folder, lambda done, total: None), cache, window)
        self.lengths = [0] * slots

    def step(self, pieces: dict[int, list[int]], every: bool = False) -> torch.Tensor:
        """Computes the next tokens of each slot; logits of each slot's last token, or of every token."""
        ids, positions, works, wanted = [], [], np.zeros(len(pieces), layout.Work), []
        for work, (slot, tokens) in zip(works, pieces.items(), strict=True):
            begin = self.lengths[slot]
            self.lengths[slot] += len(tokens)
            work["slot"], work["query_start"], work["query_tokens"] = slot, len(ids), len(tokens)
            work["context_tokens"] = self.lengths[slot]
            wanted += range(len(ids), len(ids) + len(tokens)) if every else [len(ids) + len(tokens) - 1]
            ids += tokens
            positions += range(begin, self.lengths[slot])
        slots = np.repeat(works["slot"], works["query_tokens"])
        at = np.array(positions)
        kv_slots = self.table[slots, at // BLOCK] * BLOCK + at % BLOCK
        numbers = (np.array(each, np.int32) for each in (ids, positions, kv_slots))
        inputs = StepInputs(*numbers, works=works, block_table=self.table, sampled_tokens=np.array(wanted, np.uint32))
        return self.model.forward(inputs)

    def generate(self, prompts: dict[int, list[int]], count: int, chunk: int = 1 << 20) -> dict[int, list[int]]:
        """Greedy tokens for each slot; prompts are fed `chunk` tokens at a time."""
        rows = np.zeros(len(prompts), layout.SampleRow)
        left = {slot: list(prompt) for slot, prompt in prompts.items()}
        made: dict[int, list[int]] = {slot: [] for slot in prompts}
        while any(len(tokens) < count for tokens in made.values()):
            pieces, sampling = {}, []
            for slot, prompt in left.items():
                if len(made[slot]) == count:
                    continue
                pieces[slot] = prompt[:chunk] if prompt else [made[slot][-1]]
                left[slot] = prompt[chunk:]
                if not left[slot]:
                    sampling.append(slot)
            logits = self.step(pieces)
            tokens = sample(logits.contiguous(), rows[: len(pieces)])
            for slot, token in zip(pieces, tokens, strict=True):
                if slot in sampling:
                    made[slot].append(int(token))
        return made


def driver(path: Path, slots: int = 8, window: int = 512) -> Driver:
    """A driver for a Hugging Face folder."""
    return Driver(open_folder(path, "test"), slots, window)
