"""The other end of `tests.bench.transport`, a process of its own: the real scheduler, and a model that takes no time.

Standard input brings the transport's name, the RDMA address and the binding, then the front end's offer; standard
output answers with the session. It then runs until standard input ends, and writes when it took each submission
(CLOCK_MONOTONIC, ns).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict

import numpy as np

from blink_proto.rdma.choice import RdmaChoice
from gpu_runtime.chain.child import sleep_exactly
from gpu_runtime.config import ModelLimits, RuntimeConfig, scheduler_config
from gpu_runtime.registration.choose import make_registrar
from gpu_runtime.registration.memory import HostMemory
from gpu_runtime.scheduler.host import HostScheduler
from gpu_runtime.shared_arena import ArenaLimits, SharedArena

VOCABULARY, WINDOW = 1000, 1 << 15
CONFIG = RuntimeConfig(
    channels=1,
    submit_slots=256,
    log_slots=8192,
    heap_tokens=1 << 16,
    kv_tokens=256 * WINDOW,
    token_budget=512,
    max_running=256,
    max_sequences=512,
    lease_timeout_seconds=60,
)
TOKEN = 7
_POLL_NS = 5_000_000


def run(scheduler: HostScheduler, shared: SharedArena, over: threading.Event) -> list[int]:
    """Steps until it is over; when each submission was taken."""
    stamps: list[int] = []
    words = shared.channel_out(0)
    sampled = np.empty(0, np.int32)
    while not over.is_set():
        plan = scheduler.step(sampled, time.monotonic_ns())
        taken = int(words[0]["submit_read"])
        if taken > len(stamps):
            stamps += [time.monotonic_ns()] * (taken - len(stamps))
        sampled = np.full(len(plan.rows), TOKEN, np.int32)
        if not plan.tokens:
            scheduler.poll(_POLL_NS)
    return stamps


def main() -> None:
    """See the module."""
    sleep_exactly()
    name, address, binding = sys.stdin.readline().split()
    limits = ArenaLimits(nonce=1, epoch=1, vocab_size=VOCABULARY, max_model_tokens=WINDOW, max_sequence_tokens=WINDOW)
    shared = SharedArena.create(CONFIG.arena_sizes(), limits)
    try:
        registrar = make_registrar(name, shared, HostMemory(shared), RdmaChoice("", address, binding))
        registration = registrar.register(bytes.fromhex(sys.stdin.readline()), (0,))
        session = {"answer": registration.answer.hex(), "sizes": asdict(shared.sizes)}
        sys.stdout.write(json.dumps(session) + "\n")
        sys.stdout.flush()
        over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
        config = scheduler_config(CONFIG, ModelLimits(VOCABULARY, WINDOW, ()))
        stamps = run(HostScheduler(config, shared.inbound, shared.outbound), shared, over)
        sys.stdout.write(json.dumps(stamps) + "\n")
        sys.stdout.flush()
        registration.revoke()
        registrar.close()
    finally:
        shared.unlink()


if __name__ == "__main__":
    main()
