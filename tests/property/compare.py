"""Says whether the core's plan and outbound region are the twin's."""

from __future__ import annotations

from blink_proto import arena
from gpu_runtime.scheduler import host
from tests.property import twin
from tests.property.limits import Outbound

NO_ROW = NO_TOKEN = 2**32 - 1


def assert_same_plan(core: host.Plan, expected: twin.Plan) -> None:
    """Everything but the numbers of blocks and slots."""
    header = {name: int(core.header[name]) for name in ("step", "tokens", "bucket", "works", "rows", "decode_works")}
    header |= {name: int(core.header[name]) for name in ("live", "stopped", "decode_span")}
    assert header == {
        "step": expected.step,
        "tokens": expected.tokens,
        "bucket": expected.bucket,
        "works": len(expected.works),
        "rows": len(expected.rows),
        "decode_works": expected.decode_works,
        "live": expected.live,
        "stopped": int(expected.stopped),
        "decode_span": expected.decode_span,
    }
    assert core.works.tolist() == [
        (
            int(core.works[index]["slot"]),
            work.query_start,
            work.query_tokens,
            work.start + work.query_tokens,
            NO_ROW if work.row is None else work.row,
            work.sequence.channel,
            work.sequence.position,
        )
        for index, work in enumerate(expected.works)
    ]
    assert core.decode_tiles.tolist() == expected.decode_tiles
    assert core.chunk_tiles.tolist() == expected.chunk_tiles
    assert core.token_ids.tolist() == expected.token_ids
    assert core.positions.tolist() == expected.positions
    assert_same_rows(core, expected)


def assert_same_rows(core: host.Plan, expected: twin.Plan) -> None:
    """Sample rows, bit by bit."""
    slots = {id(work.sequence): int(core.works[at]["slot"]) for at, work in enumerate(expected.works)}
    assert core.rows.tolist() == [
        (
            row.token_index,
            slots[id(row.sequence)],
            row.position,
            row.top_k,
            row.temperature,
            row.top_p,
            row.seed,
            row.flags,
            row.logprobs,
        )
        for row in expected.rows
    ]
    assert core.header["logprobs"] == any(row.logprobs for row in expected.rows)
    for sequence in dict.fromkeys(row.sequence for row in expected.rows):
        slot = slots[id(sequence)]
        assert core.history[slot][: len(sequence.tokens)].tolist() == sequence.tokens
        if sequence.extras is not None:
            assert_same_extras(core, slot, sequence.extras)


def assert_same_extras(core: host.Plan, slot: int, expected: twin.Extras) -> None:
    """What the slot's row of extras says, its bias entries and its banned sequences."""
    found = core.extras[slot]
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_tokens", "allow_only"):
        assert found[name] == getattr(expected, name), name
    assert found["stop_tokens"][: found["stop_count"]].tolist() == expected.stop_tokens
    assert core.bias[slot][: found["bias_count"]].tolist() == expected.bias
    bans = []
    for tokens in expected.bans:
        bans += [(NO_TOKEN, 0), *((token, len(tokens) - at) for at, token in enumerate(tokens, 1))]
    assert core.bans[slot][: found["ban_words"]].tolist() == bans


def assert_same_outbound(core: Outbound, expected: Outbound) -> None:
    """Every byte of telemetry, cursors and token records."""
    if core.bytes.tobytes() == expected.bytes.tobytes():
        return
    telemetry = {name: (core.telemetry(name), expected.telemetry(name)) for name in _names(arena.TELEMETRY_OFFSETS)}
    differ = {name: pair for name, pair in telemetry.items() if pair[0] != pair[1]}
    assert not differ, f"telemetry (core, twin): {differ}"
    for channel in range(core.sizes.channels):
        names = _names(arena.CHANNEL_OUT_OFFSETS)
        control = {name: (core.control(channel, name), expected.control(channel, name)) for name in names}
        differ = {name: pair for name, pair in control.items() if pair[0] != pair[1]}
        assert not differ, f"channel {channel} (core, twin): {differ}"
        for position in range(core.sizes.log_slots):
            assert core.token_record(channel, position) == expected.token_record(channel, position), position
    raise AssertionError("the regions differ outside the fields")


def _names(offsets: dict[str, int]) -> list[str]:
    return [name for name in offsets if not name.startswith("pad")]
