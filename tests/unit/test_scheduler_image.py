"""The state that is copied to a device: followed here by hand, since its pointers are device addresses."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from blink_proto import arena
from gpu_runtime.config import ModelLimits, RuntimeConfig, scheduler_config
from gpu_runtime.scheduler import image, layout
from gpu_runtime.scheduler.host import SchedulerError

BASE, INBOUND, OUTBOUND = 0x7F0000000000, 0x7E0000000000, 0x7D0000000000


def config():
    return scheduler_config(RuntimeConfig(kv_tokens=1600, max_running=4, max_sequences=10), ModelLimits(50, 64, (2,)))


def test_the_image_is_laid_out_for_its_device_addresses() -> None:
    made = image.make(config(), BASE, INBOUND, OUTBOUND)
    sizes = image.measure(config())
    assert len(made.content) == sizes.image
    assert made.addresses["block_table"] == BASE + sizes.image  # the first part that is zero
    history_bytes, table_bytes = 10 * 64 * 4, 10 * 4 * 4
    bias_bytes = 10 * 1024 * 8
    assert sizes.total == sizes.image + -(-table_bytes // 64) * 64 + bias_bytes + history_bytes
    assert BASE <= made.addresses["header"] < made.addresses["works"] < made.addresses["sampled"]
    assert sorted(made.addresses.values())[-1] < BASE + sizes.total


def test_the_pools_are_full_and_give_out_low_ids_first() -> None:
    made = image.make(config(), BASE, INBOUND, OUTBOUND)
    words = np.frombuffer(made.cold, np.uint64, 5)
    assert words[0] == BASE
    free_slots = made.content[int(words[4]) - BASE :][:40].view(np.uint32)
    assert free_slots.tolist() == list(range(9, -1, -1))
    counts = np.frombuffer(made.cold, np.uint32)[10:12]
    assert counts.tolist() == [10, 8]  # sequences and channels


def test_the_regions_and_the_configuration_are_in_the_state() -> None:
    made = image.make(config(), BASE, INBOUND, OUTBOUND)
    assert made.content[: layout.SchedulerConfig.itemsize].tobytes() == config().tobytes()
    words = made.content[: len(made.content) // 8 * 8].view(np.uint64)
    assert INBOUND in words
    assert OUTBOUND in words


def test_a_wrong_configuration_is_refused() -> None:
    wrong = config()
    wrong["log_slots"] = 3
    with pytest.raises(SchedulerError, match="log_slots"):
        image.make(wrong, BASE, INBOUND, OUTBOUND)


def test_shared_memory_counts_what_a_step_keeps_there() -> None:
    few, many = config(), config()
    many["max_sequences"] = 14
    sequence_bytes = (image.measure(many).shared - image.measure(few).shared - 3 * 4 * 4) // 4
    assert sequence_bytes % 16 == 0
    assert 100 < sequence_bytes < 512
    assert arena.MAX_CHANNELS == 64
    assert ctypes.sizeof(ctypes.c_void_p) == 8
