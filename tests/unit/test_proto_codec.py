"""Words and records survive being written and read, against `struct` as the second opinion."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blink_proto import arena

U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
F32 = st.floats(width=32, allow_nan=False)


@given(U32, U32)
def test_commit_word(lap: int, lease: int) -> None:
    word = arena.pack_commit_word(lap, lease)
    assert struct.pack("<Q", word) == struct.pack("<II", lap, lease)
    assert arena.unpack_commit_word(word) == (lap, lease)


@given(U16, U8, U8, U32)
def test_token_head(lap: int, kind: int, finish: int, sequence: int) -> None:
    word = arena.pack_token_head(lap, kind, finish, sequence)
    assert struct.pack("<Q", word) == struct.pack("<HBBI", lap, kind, finish, sequence)
    assert arena.unpack_token_head(word) == (lap, kind, finish, sequence)


@given(U16, U16, U32)
def test_token_body(lap: int, detail: int, token: int) -> None:
    word = arena.pack_token_body(lap, detail, token)
    assert struct.pack("<Q", word) == struct.pack("<HHI", lap, detail, token)
    assert arena.unpack_token_body(word) == (lap, detail, token)


@given(U64, U64, U64)
def test_a_field_that_is_too_large_does_not_reach_its_neighbours(lap: int, detail: int, token: int) -> None:
    word = arena.pack_token_body(lap, detail, token)
    assert arena.unpack_token_body(word) == (lap % 2**16, detail % 2**16, token % 2**32)


@given(st.lists(U64, max_size=20))
def test_words_of_an_array(words: list[int]) -> None:
    parts = arena.unpack_token_head(np.array(words, np.uint64))
    assert list(zip(*(part.tolist() for part in parts), strict=True)) == [
        arena.unpack_token_head(word) for word in words
    ]


@given(st.tuples(U32, U32, U32, U32, F32, F32, U64, U32, U32), st.lists(U32, min_size=8, max_size=8), U64)
def test_submit_record(head: tuple[Any, ...], stops: list[int], commit: int) -> None:
    record = np.zeros((), arena.SubmitRecord)
    names = (
        "prompt_offset",
        "prompt_tokens",
        "max_tokens",
        "top_k",
        "temperature",
        "top_p",
        "seed",
        "flags",
        "stop_count",
    )
    for name, value in zip(names, head, strict=True):
        record[name] = value
    record["stop_tokens"], record["commit"] = stops, commit
    raw = record.tobytes()
    assert raw == struct.pack("<IIIIffQII8I48xQ", *head, *stops, commit)
    again = np.frombuffer(raw, arena.SubmitRecord)[0]
    assert (again[list(names)].item(), again["stop_tokens"].tolist(), int(again["commit"])) == (head, stops, commit)


@given(U64, U64)
def test_two_word_records(first: int, second: int) -> None:
    for kind in (arena.CancelRecord, arena.TokenRecord):
        raw = struct.pack("<QQ", first, second)
        assert np.frombuffer(raw, kind)[0].item() == (first, second)


@given(st.lists(U64, min_size=20, max_size=20))
def test_telemetry(values: list[int]) -> None:
    raw = struct.pack("<20Q96x", *values)
    record = np.frombuffer(raw, arena.Telemetry)[0]
    assert [int(record[name]) for name in arena.TELEMETRY_OFFSETS if name != "pad0"] == values


@given(st.integers(0, 2**40), st.sampled_from([1, 8, 64, 4096]))
def test_align_up(value: int, alignment: int) -> None:
    aligned = arena.align_up(value, alignment)
    assert aligned % alignment == 0
    assert 0 <= aligned - value < alignment
