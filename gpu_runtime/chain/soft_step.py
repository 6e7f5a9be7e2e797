"""A step of the soft GPU: layers and sampling for what the scheduler planned."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_runtime.kernels.sampling import Slots, sample
from gpu_runtime.model.llama import KVCache, LlamaModel
from gpu_runtime.model.source import ModelFolder
from gpu_runtime.model.step import StepInputs
from gpu_runtime.model.weights import Weights
from gpu_runtime.scheduler import layout
from gpu_runtime.scheduler.host import Plan


class SoftStep:
    """Runs planned steps of one model.

    Args:
        folder: the model.
        threads: of the CPU; 0: all cores.
        config: layout.SchedulerConfig, which fixes window, blocks and buckets.
        progress: told how many tensors are loaded and, on top of them, how many buckets are warm.
    """

    def __init__(
        self, folder: ModelFolder, threads: int, config: NDArray[np.void], progress: Callable[[int], None]
    ) -> None:
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        torch.set_grad_enabled(False)
        buckets = [int(b) for b in config["buckets"][: int(config["bucket_count"])]]
        weights = Weights(folder, lambda done, _: progress(done))
        cache = KVCache(folder.config, int(config["blocks"]), int(config["block_tokens"]))
        self._model = LlamaModel(folder.config, weights, cache, int(config["max_model_tokens"]))
        self._table = np.zeros((1, int(config["blocks_per_sequence"])), np.int32)
        for done, bucket in enumerate(buckets):
            self._warm(bucket)
            progress(len(folder.tensors.file_of) + done + 1)

    def run(self, plan: Plan) -> NDArray[np.int32]:
        """The sampled token of each row of the plan, int32 [rows]."""
        step = StepInputs(
            plan.token_ids,
            plan.positions,
            plan.kv_slots,
            plan.works,
            plan.block_table,
            plan.rows["token_index"],
        )
        logits = self._model.forward(step)
        if not len(plan.rows):
            return np.empty(0, np.int32)
        return sample(logits, plan.rows, Slots(plan.history, plan.extras, plan.bias, plan.bans), plan.logprobs)

    def _warm(self, tokens: int) -> None:
        """One step of padding only, into the scratch block."""
        zeros = np.zeros(tokens, np.int32)
        works, rows = np.empty(0, layout.Work), np.zeros(1, np.uint32)
        self._model.forward(StepInputs(zeros, zeros, zeros, works, self._table, rows))
