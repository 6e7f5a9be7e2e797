"""The scheduler's state in device memory, with the arena that it looks at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.cuda.memory import DeviceMemory, MappedMemory
from gpu_runtime.model.device_plan import DevicePlan, SamplingSlots, decode_tiles_max, words_of
from gpu_runtime.scheduler import image, layout
from gpu_runtime.shared_arena import SharedArena


class DeviceArena:
    """Both regions in device memory, and their twins in host memory that local front ends use (the `shm` transport)."""

    def __init__(self, shared: SharedArena) -> None:
        self.inbound = DeviceMemory(shared.inbound.nbytes)
        self.outbound = DeviceMemory(shared.outbound.nbytes)
        self.outbound.write(0, shared.outbound)
        self.host_inbound = MappedMemory(shared.inbound)
        self.host_outbound = MappedMemory(shared.outbound)

    def free(self) -> None:
        """Gives everything back; never while the chain runs."""
        for part in (self.inbound, self.outbound):
            part.free()
        for mapping in (self.host_inbound, self.host_outbound):
            mapping.close()


class DeviceScheduler:
    """The state and the views of its plan.

    Args:
        config: 0-d layout.SchedulerConfig.

    Raises:
        SchedulerError: the configuration is wrong.
    """

    def __init__(self, config: NDArray[np.void], inbound: int, outbound: int) -> None:
        sizes = image.measure(config)
        self._memory = DeviceMemory(sizes.total)
        made = image.make(config, self._memory.address, inbound, outbound)
        self._memory.write(0, made.content)
        self.state_address = self._memory.address
        self.plan = self._views(config, made.addresses)
        self._header_at = made.addresses["header"] - self._memory.address

    def header(self) -> np.void:
        """A copy of the present plan's header (layout.StepHeader)."""
        (header,) = self._memory.read(self._header_at, layout.StepHeader, 1)
        return header  # type: ignore[no-any-return]

    def free(self) -> None:
        """Gives the memory back; never while the chain runs."""
        self._memory.free()

    def _views(self, config: NDArray[np.void], addresses: dict[str, int]) -> DevicePlan:
        running, tokens = int(config["max_running"]), int(config["buckets"][int(config["bucket_count"]) - 1])
        shapes: dict[str, tuple[int, ...]] = {
            "header": (words_of(layout.StepHeader.itemsize),),
            "works": (running, words_of(layout.Work.itemsize)),
            "rows": (running, words_of(layout.SampleRow.itemsize)),
            "decode_tiles": (decode_tiles_max(running), words_of(layout.Tile.itemsize)),
            "chunk_tiles": (tokens // layout.CHUNK_TILE + running, words_of(layout.Tile.itemsize)),
            "token_ids": (tokens,),
            "positions": (tokens,),
            "kv_slots": (tokens,),
            "block_table": (int(config["max_sequences"]), int(config["blocks_per_sequence"])),
            "sampled": (running,),
        }
        views = {name: self._memory.tensor(addresses[name], shape) for name, shape in shapes.items()}
        return DevicePlan(**views, slots=self._slots(config, addresses))

    def _slots(self, config: NDArray[np.void], addresses: dict[str, int]) -> SamplingSlots:
        sequences, window = int(config["max_sequences"]), int(config["max_model_tokens"])
        shapes = {
            "history": (sequences, window),
            "extras": (sequences, words_of(layout.SampleExtras.itemsize)),
            "bias": (sequences, arena.MAX_BIAS * words_of(layout.BiasEntry.itemsize)),
            "bans": (sequences, arena.MAX_BAN_WORDS * words_of(layout.BanToken.itemsize)),
            "sampled_logprobs": (int(config["max_running"]), words_of(layout.RowLogprobs.itemsize)),
        }
        return SamplingSlots(*(self._memory.tensor(addresses[name], shape) for name, shape in shapes.items()))
