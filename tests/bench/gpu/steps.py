"""Times of a chain's steps, by its own stamps: `python -m tests.bench.gpu.steps --model Llama-3.1-8B`.

Starts the chain in this process with random weights and prints rows as lines of JSON. `--device cpu` measures the soft
GPU with a tiny model instead, to work on the measurement itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.bench.gpu import floors, peers, stamps
from tests.bench.gpu.chains import LocalChain, local_chain
from tests.bench.gpu.front import Front
from tests.bench.gpu.rows import REHEARSAL, Row, to_lines
from tests.shapes import token_prompt, write_folder

CONTEXT = 1024
STEPS = 160
"""Decode steps in which all sequences take part, about."""
SEQUENCES = {"Llama-3.1-8B": (1, 8, 64, 256), "Llama-3.2-1B": (1, 64), "SmolLM2-135M": (1, 64)}
PREFILLS = {"Llama-3.1-8B": (512, 2048, 8192)}
PREFILL_REPEATS = 5
SCHEDULER_TARGET_US = 10.0
WAIT_SECONDS = 120.0
BUDGET = 8192


@dataclass(frozen=True)
class Plan:
    """Sizes of one model's measurement."""

    model: str
    device: str
    context: int
    steps: int
    sequences: Sequence[int]
    prefills: Sequence[int]
    budget: int

    @classmethod
    def of(cls, model: str, device: str) -> Plan:
        """As the issue of a GPU wants it; small on the CPU."""
        if device == "cpu":
            return cls(REHEARSAL, device, 96, 24, (1, 4), (64, 128), 128)
        return cls(model, device, CONTEXT, STEPS, SEQUENCES[model], PREFILLS.get(model, ()), BUDGET)

    @property
    def choices(self) -> dict[str, object]:
        """Of `make_config`."""
        most = max(self.sequences)
        longest = max([self.context + self.steps + self.budget // 64, *(tokens + 16 for tokens in self.prefills)])
        window = -(-longest // 64) * 64
        return {
            "dtype": "" if self.device == "cpu" else "bfloat16",
            "random_weights": self.device != "cpu",
            "kv_tokens": max(most * (self.context + 2 * self.steps), 2 * window),
            "max_running": max(most, 8),
            "max_sequences": max(2 * most, 16),
            "token_budget": self.budget,
            "max_model_tokens": window,
            "heap_tokens": 1 << 20,
        }


def folder_of(plan: Plan, where: Path) -> Path:
    """A model folder of the shapes."""
    if plan.device != "cpu":
        return write_folder(where / plan.model, plan.model)
    from tests.tiny import save_tiny

    return save_tiny(where / plan.model, "llama")


def start_rows(plan: Plan, chain: LocalChain) -> Iterator[Row]:
    """Start-up and the graphs' memory."""
    made = chain.chain
    yield Row("start", plan.model, "chain: weights, warm-up, graphs", made.start_seconds, unit="s", target=60.0)
    graphs = getattr(made, "graph_count", 0)
    yield Row("start", plan.model, f"memory of {graphs} step graphs", made.graph_bytes / 2**20, unit="MiB")


def decode_rows(plan: Plan, chain: LocalChain, front: Front) -> Iterator[Row]:
    """A decode step for each number of sequences, with the scheduler's part and what is between steps."""
    for sequences in plan.sequences:
        times = _decode(plan, chain, front, sequences)
        what = f"decode step, {_count(sequences)}"
        if times is None:
            yield Row("steps", plan.model, what, error="no step with all sequences was seen")
            continue
        floor = floors.decode_floor(chain.folder.config, sequences, plan.context).seconds * 1e3
        row = Row("steps", plan.model, what, times.step_p50 * 1e3, times.step_p99 * 1e3, floor=floor)
        yield Row(**{**row.__dict__, "peers": peers.tpot(plan.model, sequences)})
        for name, value in (("scheduler", times.scheduler), ("between steps", times.between)):
            yield Row("steps", plan.model, f"{name}, {_count(sequences)}", value * 1e6, unit="µs")
        both = (times.scheduler + times.between) * 1e6
        target = SCHEDULER_TARGET_US
        yield Row("steps", plan.model, f"scheduler + between, {_count(sequences)}", both, unit="µs", target=target)


def prefill_rows(plan: Plan, chain: LocalChain, front: Front) -> Iterator[Row]:
    """A whole prompt in one step."""
    for tokens in plan.prefills:
        seconds = _prefill(chain, front, tokens)
        if not len(seconds):
            yield Row("prefill", plan.model, f"{tokens} tokens", error="the prompt was not computed in one step")
            continue
        floor = floors.prefill_floor(chain.folder.config, tokens).seconds * 1e3
        p50, worst = np.median(seconds) * 1e3, seconds.max() * 1e3
        yield Row("prefill", plan.model, f"prefill of {tokens} tokens", float(p50), float(worst), floor=floor)


def _decode(plan: Plan, chain: LocalChain, front: Front, sequences: int) -> stamps.StepTimes | None:
    """Prompts end half of the steps before the context in question. Those computed first wait, decoding, for the
    last: so each generates as many tokens more as there are steps of prompts."""
    before = stamps.last_step(chain.chain.stamps())
    prompt = plan.context - plan.steps // 2
    prompt_steps = -(-sequences * prompt // (plan.budget - sequences))
    answer = plan.steps + prompt_steps
    made = [
        front.submit(token_prompt(prompt, chain.limits.vocab_size, 1000 * sequences + index), answer, WAIT_SECONDS)
        for index in range(sequences)
    ]
    front.run(made, WAIT_SECONDS)
    return stamps.decode_steps(stamps.after(chain.chain.stamps(), before), sequences)


def _prefill(chain: LocalChain, front: Front, tokens: int) -> np.ndarray:
    """The first one is warm-up."""
    before = 0
    for repeat in range(PREFILL_REPEATS + 1):
        if repeat == 1:
            before = stamps.last_step(chain.chain.stamps())
        prompt = token_prompt(tokens, chain.limits.vocab_size, tokens + repeat)
        front.run([front.submit(prompt, 2, WAIT_SECONDS)], WAIT_SECONDS)
    return stamps.prefill_steps(stamps.after(chain.chain.stamps(), before), tokens)


def _count(sequences: int) -> str:
    return f"{sequences} sequence{'s'[: sequences > 1]}"


def measure(plan: Plan, only: Sequence[str]) -> Iterator[Row]:
    """All rows of one model."""
    with tempfile.TemporaryDirectory() as where:
        folder = folder_of(plan, Path(where))
        with local_chain(folder, plan.device, **plan.choices) as chain:
            yield from start_rows(plan, chain)
            front = chain.front()
            if "steps" in only:
                yield from decode_rows(plan, chain, front)
            if "prefill" in only:
                yield from prefill_rows(plan, chain, front)
            yield _device_row(plan)


def _device_row(plan: Plan) -> Row:
    """Memory in use once everything has run."""
    if plan.device == "cpu":
        return Row("start", plan.model, "device memory in use", unit="GiB")
    import torch

    free, total = torch.cuda.mem_get_info()
    return Row("start", plan.model, "device memory in use", (total - free) / 2**30, unit="GiB")


def main() -> None:
    """Rows as lines on standard output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=list(SEQUENCES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="steps,prefill", type=lambda text: text.split(","))
    arguments = parser.parse_args()
    for row in measure(Plan.of(arguments.model, arguments.device), arguments.only):
        sys.stdout.write(to_lines([row]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
