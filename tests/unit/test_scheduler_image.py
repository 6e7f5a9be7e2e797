"""The state that is copied to a device: followed here by hand, since its pointers are device addresses."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from gpu_runtime.config import ModelLimits, RuntimeConfig, scheduler_config
from gpu_runtime.scheduler import image, layout
from gpu_runtime.scheduler.host import SchedulerError

BASE, INBOUND, OUTBOUND = 0x7F0000000000, 0x7E0000000000, 0x7D0000000000


@cache  # each has a seed of its own
def config():
    return scheduler_config(RuntimeConfig(kv_tokens=1600, max_running=4, max_sequences=10), ModelLimits(50, 64, (2,)))


def test_the_image_is_laid_out_for_its_device_addresses() -> None:
    made = image.make(config(), BASE, INBOUND, OUTBOUND)
    sizes = image.measure(config())
    assert len(made.content) == sizes.image
    assert made.addresses["block_table"] == BASE + sizes.image  # the first part that is zero
    history_bytes, table_bytes = 10 * 64 * 4, 10 * 4 * 4
    bias_bytes = bans_bytes = 10 * 1024 * 8
    blocks = 101 * (64 + 16 * 4)  # what is known of each, and its tokens
    cache_bytes = blocks + 2 * 256 * 4 + 2 * 256 * 4 + 10 * 32 + 10 * 4 * 8 + 64
    slots_bytes = bias_bytes + bans_bytes + history_bytes
    assert sizes.total == sizes.image + -(-table_bytes // 64) * 64 + cache_bytes + slots_bytes
    assert BASE <= made.addresses["header"] < made.addresses["works"] < made.addresses["sampled"]
    assert sorted(made.addresses.values())[-1] < BASE + sizes.total


def test_the_pools_are_full_and_give_out_low_ids_first() -> None:
    content = image.make(config(), BASE, INBOUND, OUTBOUND).content.tobytes()
    slots = content.find(np.arange(9, -1, -1, dtype=np.uint32).tobytes())
    blocks = content.find(np.arange(100, 0, -1, dtype=np.uint32).tobytes())  # 1600 tokens in blocks of 16
    assert slots % 64 == 0
    assert blocks % 64 == 0
    for at in (slots, blocks):
        assert (BASE + at).to_bytes(8, "little") in content  # the state points to it


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
