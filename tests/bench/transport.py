"""What a transport gives one worker: `python -m tests.bench.transport [--transport shm] [--seconds 3]`.

The channel's protocol as the front end runs it, against the real scheduler in a process of its own with a model that
takes no time. Both want a core. `--transport verbs --address 10.9.0.1` goes through an RDMA device of this machine,
with `--binding` by one package and not the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from blink_proto import arena
from blink_proto.arena import Finish
from blink_proto.links import TRANSPORTS
from blink_proto.rdma.binding import AUTO, BINDING_CHOICES
from blink_proto.rdma.choice import RdmaChoice
from dpu_service.channel.client import ChannelClient
from dpu_service.channel.geometry import Geometry
from dpu_service.channel.prompt import SharedPrompt
from dpu_service.channel.rings import Sampling
from dpu_service.sequences.pump import Pump
from dpu_service.transport.choose import make_connector
from tests.bench.transport_device import CONFIG, VOCABULARY, WINDOW

PATIENCE = 60.0
STREAMS = CONFIG.max_running
PROMPT = [1, 2, 3, 4]
PROBES = 400
PROBE_PAUSE = 0.002
BEAT_EVERY = 0.5


@dataclass
class Bench:
    """A front end with a lease, and the device's process."""

    client: ChannelClient
    process: subprocess.Popen[str]
    beaten: float = 0.0

    def turn(self) -> list[Any]:
        """What a worker does over and over."""
        now = time.monotonic()
        if now - self.beaten > BEAT_EVERY:
            self.beaten = now
            self.client.beat(time.monotonic_ns())
        news = self.client.poll()
        self.client.fetch()
        return news

    def end(self) -> list[int]:
        """When the device took each submission."""
        self.client.give_back()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        time.sleep(0.2)
        self.process.stdin.close()
        stamps: list[int] = json.loads(self.process.stdout.readline())
        self.process.wait(PATIENCE)
        self.client.close()
        return stamps


def begin(transport: str, rdma: RdmaChoice) -> Bench:
    """Starts the device and takes the lease."""
    command = [sys.executable, "-m", "tests.bench.transport_device"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    connector = make_connector(transport, rdma)
    process.stdin.write(f"{transport} {rdma.address} {rdma.binding}\n{connector.offer.hex()}\n")
    process.stdin.flush()
    session = json.loads(process.stdout.readline())
    sizes = arena.Sizes(**session["sizes"])
    client = ChannelClient(connector.connect(bytes.fromhex(session["answer"]), sizes, 0), geometry(sizes), 0)
    client.ask_lease(time.monotonic_ns())
    end = time.monotonic() + PATIENCE
    while not client.take_lease():
        assert time.monotonic() < end, "the device gives no lease"
        client.fetch()
        time.sleep(0.001)
    return Bench(client, process)


def geometry(sizes: arena.Sizes) -> Geometry:
    """As the session would tell it."""
    return Geometry(
        layout_hash=arena.LAYOUT_HASH,
        version=arena.VERSION,
        inbound_bytes=arena.InboundLayout(sizes).total_bytes,
        outbound_bytes=arena.OutboundLayout(sizes).total_bytes,
        nonce=1,
        epoch=1,
        vocab_size=VOCABULARY,
        max_model_tokens=WINDOW,
        max_sequence_tokens=WINDOW,
        **{
            name: getattr(sizes, name)
            for name in ("channels", "submit_slots", "cancel_slots", "log_slots", "heap_tokens")
        },
    )


def submissions_per_second(transport: str, rdma: RdmaChoice, seconds: float) -> tuple[float, float]:
    """One-token sequences in a closed loop, as many at a time as the ring holds; and µs of CPU for each."""
    bench = begin(transport, rdma)
    sampling, done = Sampling(max_tokens=1), 0
    begun, cpu = time.monotonic(), time.process_time()
    while (now := time.monotonic()) - begun < seconds:
        while bench.client.tracked < STREAMS and bench.client.submit(SharedPrompt(PROMPT, 1), sampling) is not None:
            pass
        done += sum(item.finish is not Finish.NONE for item in bench.turn())
    spent = time.process_time() - cpu
    bench.end()
    return done / (now - begun), spent * 1e6 / max(done, 1)


def records_per_second(transport: str, rdma: RdmaChoice, seconds: float) -> tuple[float, float]:
    """Token records of endless sequences, as fast as they can be taken; and µs of CPU for each."""
    bench = begin(transport, rdma)
    for _ in range(STREAMS):
        bench.client.submit(SharedPrompt(PROMPT, 1), Sampling(max_tokens=WINDOW - len(PROMPT)))
    end = time.monotonic() + PATIENCE
    while not bench.turn():
        assert time.monotonic() < end, "no tokens"
    begun, cpu, records = time.monotonic(), time.process_time(), 0
    while (now := time.monotonic()) - begun < seconds:
        records += sum(len(item.tokens) for item in bench.turn())
    spent = time.process_time() - cpu
    bench.end()
    return records / (now - begun), spent * 1e6 / max(records, 1)


def pickup(transport: str, rdma: RdmaChoice) -> tuple[np.ndarray, np.ndarray]:
    """µs from the call of `submit`, and from its return, until the idle scheduler has taken the submission."""
    bench = begin(transport, rdma)
    called, returned = [], []
    for _ in range(PROBES):
        prompt, sampling = SharedPrompt(PROMPT, 1), Sampling(max_tokens=1)
        called.append(time.monotonic_ns())
        bench.client.submit(prompt, sampling)
        returned.append(time.monotonic_ns())
        end = time.monotonic() + PATIENCE
        while not any(item.finish is not Finish.NONE for item in bench.turn()):
            assert time.monotonic() < end, "no answer"
            time.sleep(0)
        time.sleep(PROBE_PAUSE)
    taken = np.array(bench.end()[:PROBES])
    return (taken - np.array(called)) / 1e3, (taken - np.array(returned)) / 1e3


def idle_share(transport: str, rdma: RdmaChoice, seconds: float) -> float:
    """Share of a core that a worker's pump takes with a live lease and nothing to do."""
    bench = begin(transport, rdma)

    async def idle() -> float:
        pump = Pump(bench.client, queue_depth=256, device_timeout=60)
        pumping = asyncio.create_task(pump.run())
        await asyncio.sleep(1.0)
        cpu, begun = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        share = (time.process_time() - cpu) / (time.monotonic() - begun)
        pumping.cancel()
        return share

    share = asyncio.run(idle())
    bench.end()
    return share


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=TRANSPORTS, default="shm")
    parser.add_argument("--address", default="10.9.0.1", help="of the RDMA device")
    parser.add_argument("--binding", choices=BINDING_CHOICES, default=AUTO, help="package for --transport verbs")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--note", default="", help="words for the table's head, about the machine")
    arguments = parser.parse_args()
    way = (arguments.transport, RdmaChoice("", arguments.address, arguments.binding))
    print(
        f"{arguments.transport} {arguments.binding}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} "
        f"{arguments.note}\n"
    )
    print("| one worker | |\n|---|---|")
    rate, cost = submissions_per_second(*way, arguments.seconds)
    print(f"| submissions/s, each of one token, to its end | {rate:,.0f} ({cost:.1f} µs of CPU each) |", flush=True)
    rate, cost = records_per_second(*way, arguments.seconds)
    print(f"| token records/s of {STREAMS} sequences | {rate:,.0f} ({cost:.2f} µs of CPU each) |", flush=True)
    for name, times in zip(("call", "return"), pickup(*way), strict=True):
        p50, p99 = np.percentile(times, (50, 99))
        print(
            f"| from the {name} of submit to the scheduler's pick-up | P50 {p50:.0f} µs, P99 {p99:.0f} µs |", flush=True
        )
    print(f"| CPU share of an idle pump | {100 * idle_share(*way, arguments.seconds):.2f} % |", flush=True)


if __name__ == "__main__":
    main()
