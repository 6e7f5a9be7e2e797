"""A few steps of a small model, each launched from the host, for tools that watch kernels: compute-sanitizer, ncu.

`python -m tests.gpu.bounded_steps FOLDER [--dtype float32] [--steps 40]`: decodes and prompt chunks together, sequences
that end and are cancelled, sampled and greedy ones, with banned sequences of tokens. Ends with status 0 when every
sequence has ended as it should.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from blink_proto import arena
from blink_proto.arena import Finish
from gpu_runtime.config import make_config
from tests.bench.gpu.chains import LocalChain, open_model
from tests.bench.gpu.front import Front
from tests.shapes import token_prompt


def play(chain: LocalChain, steps: int) -> list[Finish]:
    """How each of the sequences ended, NONE for those that did not."""
    front = Front(chain.shared)
    front.beat()
    front.commit(front.control_offset + arena.CHANNEL_IN_OFFSETS["lease"], 1)
    front.lease = 1
    for _ in range(3):
        chain.chain.step_once()
    lengths = (1, 5, 17, 40, 130)
    bans = [[token, token + 1] for token in range(0, 260, 2)]
    made = [
        front.submit(
            token_prompt(length, chain.limits.vocab_size, length),
            6,
            temperature=0.7 * (index % 2),
            top_k=20,
            bans=bans[:length],
        )
        for index, length in enumerate(lengths)
    ]
    last = front.submit(token_prompt(9, chain.limits.vocab_size, 9), 200)
    for step in range(steps):
        chain.chain.step_once()
        front.poll()
        if step == 10:
            front.append_cancel(last.position)
    front.poll()
    return [one.finish for one in (*made, last)]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    config = make_config(
        "cuda", dtype=arguments.dtype, kv_tokens=1024, max_running=8, max_sequences=8, token_budget=64, channels=2
    )
    chain = LocalChain(open_model(arguments.folder, config), config, launches_itself=False)
    try:
        endings = play(chain, arguments.steps)
    finally:
        chain.release()
    expected = [Finish.LENGTH] * 5 + [Finish.CANCELLED]
    assert endings == expected, f"sequences ended by {endings}"
    print(f"{arguments.steps} steps, all sequences ended as they should")


if __name__ == "__main__":
    main()
