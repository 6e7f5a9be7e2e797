"""Log-probabilities in answers and streams of the real front end over a scripted device."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from blink_proto.arena import Finish
from tests import tiny_text
from tests.front_end import FrontEnd
from tests.replay import Script, Submission
from tests.unit.test_dpu_streams import BOTH, ask, events, post, says

EITHER_WAY = pytest.mark.parametrize("stream", [False, True])


def wanted(endpoint: str, top: int) -> dict[str, Any]:
    """The fields that ask for so many likely tokens."""
    return {"logprobs": True, "top_logprobs": top} if endpoint == "chat" else {"logprobs": top}


def choices_of(answer: httpx.Response, index: int = 0) -> list[Any]:
    """The choice, or all its pieces."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [choice for choice in answer.json()["choices"] if choice["index"] == index]
    return [choice for event in events(answer) for choice in event["choices"] if choice["index"] == index]


def rows_of(choice: Any) -> list[tuple[Any, ...]]:
    """A tuple for each token, whatever the endpoint: text, value, likely ones, and offset or bytes."""
    found = choice["logprobs"]
    if found is None:
        return []
    if "content" in found:
        assert set(found) == {"content", "refusal"}
        assert found["refusal"] is None
        return [(one["token"], one["logprob"], one["top_logprobs"], one["bytes"]) for one in found["content"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert set(found) == set(names)
    return list(zip(*(found[name] for name in names), strict=True))


def rows(answer: httpx.Response, index: int = 0) -> list[tuple[Any, ...]]:
    return [row for choice in choices_of(answer, index) for row in rows_of(choice)]


def text_of(choice: Any) -> str:
    """Text of a piece or a choice."""
    said = choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content", "")
    assert isinstance(said, str)
    return said


def byte_of(token: int) -> int:
    """What a byte's token stands for."""
    return next(byte for byte in range(256) if tiny_text.byte_ids(bytes([byte])) == [token])


@EITHER_WAY
def test_a_completion_token_by_token(front: FrontEnd, stream: bool) -> None:
    ids = tiny_text.byte_ids("a😀b".encode())
    likely = tiny_text.byte_ids(b"x \xff")
    table = [[(token, -0.5), *zip(likely, (-1.0, -1.25, -3.0), strict=True)] for token in ids]
    says(front, ids, every=0.002, logprobs=table)
    found = rows(ask(front, "completions", logprobs=3, stream=stream))
    names = ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80", "b"]
    assert [row[0] for row in found] == names
    assert [row[1] for row in found] == [-0.5] * 6
    assert [row[2] for row in found] == [{"x": -1.0, " ": -1.25, r"bytes:\xff": -3.0, name: -0.5} for name in names]
    assert [row[3] for row in found] == [0, 1, 1, 1, 1, 2], "offsets are of the character"


@EITHER_WAY
def test_a_chat_token_by_token(front: FrontEnd, stream: bool) -> None:
    ids = [*tiny_text.ids(" the"), *tiny_text.byte_ids("é".encode())]
    assert len(ids) == 3
    table = [[(token, -0.125), (ids[0], -0.25), (ids[1], -7.5)] for token in ids]
    says(front, ids, every=0.002, logprobs=table)
    found = rows(ask(front, "chat", logprobs=True, top_logprobs=2, stream=stream))
    likely = [
        {"token": " the", "logprob": -0.25, "bytes": [32, 116, 104, 101]},
        {"token": r"\xc3", "logprob": -7.5, "bytes": [0xC3]},
    ]
    assert found == [
        (" the", -0.125, likely, [32, 116, 104, 101]),
        (r"\xc3", -0.125, likely, [0xC3]),
        (r"\xa9", -0.125, likely, [0xA9]),
    ]


@BOTH
def test_how_many_the_device_is_asked_for(front: FrontEnd, endpoint: str) -> None:
    for top in (0, 5, 20):
        says(front, tiny_text.byte_ids(b"ab"))
        found = rows(ask(front, endpoint, **wanted(endpoint, top)))
        assert front.device.submissions.pop().logprobs == 1 + top
        own = 1 if endpoint == "completions" else 0
        assert [len(row[2]) for row in found] == [top + own] * 2
    for fields in ({}, {"logprobs": None}, {"logprobs": False} if endpoint == "chat" else {}):
        (choice,) = choices_of(ask(front, endpoint, **fields))
        assert choice["logprobs"] is None
        assert front.device.submissions.pop().logprobs == 0
    assert all(choice["logprobs"] is None for choice in choices_of(ask(front, endpoint, stream=True)))


def test_true_alone_gives_no_likely_tokens(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"ab"))
    assert rows(ask(front, "chat", logprobs=True)) == [("a", -0.5, [], [97]), ("b", -0.5, [], [98])]


@BOTH
@EITHER_WAY
def test_the_token_that_ends_the_sequence_has_no_entry(front: FrontEnd, endpoint: str, stream: bool) -> None:
    for said in (b"abc", b""):
        says(front, tiny_text.byte_ids(said), every=0.002)
        answer = ask(front, endpoint, stream=stream, **wanted(endpoint, 1))
        assert "".join(row[0] for row in rows(answer)) == said.decode()
        if not stream:
            assert answer.json()["usage"]["completion_tokens"] == len(said) + 1
            assert answer.json()["choices"][0]["logprobs"] is not None
    says(front, tiny_text.byte_ids(b"abc"), Finish.LENGTH)
    assert len(rows(ask(front, endpoint, stream=stream, **wanted(endpoint, 1)))) == 3
    says(front, tiny_text.byte_ids(b"abc"), Finish.LENGTH, end_apart=True, every=0.002)
    assert len(rows(ask(front, endpoint, stream=stream, **wanted(endpoint, 1)))) == 3


@BOTH
def test_each_chunk_carries_the_tokens_of_its_text(front: FrontEnd, endpoint: str) -> None:
    """A token a letter, some held back because a stop string may come of them."""
    says(front, tiny_text.byte_ids(b"an Alice! Alic"), Finish.LENGTH, every=0.003)
    pieces = choices_of(ask(front, endpoint, stop=["Alice:"], stream=True, **wanted(endpoint, 0)))
    for piece in pieces:
        assert "".join(row[0] for row in rows_of(piece)) == text_of(piece)
        assert (piece["logprobs"] is None) == (text_of(piece) == "")
    assert "".join(map(text_of, pieces)) == "an Alice! Alic"
    assert len(pieces) > 4


@BOTH
def test_the_bytes_of_a_character_come_with_it(front: FrontEnd, endpoint: str) -> None:
    says(front, tiny_text.byte_ids("a漢é😀".encode()), every=0.003)
    pieces = choices_of(ask(front, endpoint, stream=True, **wanted(endpoint, 0)))
    for piece in pieces:
        assert len(rows_of(piece)) == len(text_of(piece).encode())
    assert "".join(map(text_of, pieces)) == "a漢é😀"


@BOTH
@EITHER_WAY
def test_half_a_character_at_the_end_has_its_entries(front: FrontEnd, endpoint: str, stream: bool) -> None:
    says(front, tiny_text.byte_ids(b"a\xf0\x9f"), Finish.LENGTH, every=0.003)
    answer = ask(front, endpoint, stream=stream, **wanted(endpoint, 0))
    mark = "bytes:" if endpoint == "completions" else ""
    assert [row[0] for row in rows(answer)] == ["a", rf"{mark}\xf0", rf"{mark}\x9f"]
    assert len(rows_of(choices_of(answer)[-1])) == (2 if stream else 3)
    assert "".join(map(text_of, choices_of(answer))) == "a\ufffd"


@BOTH
@EITHER_WAY
def test_tokens_of_a_stop_string_have_entries_and_those_behind_it_none(
    front: FrontEnd, endpoint: str, stream: bool
) -> None:
    says(front, tiny_text.byte_ids(b"a b cde"), Finish.NONE)
    answer = ask(front, endpoint, stop="b c", stream=stream, **wanted(endpoint, 0))
    assert "".join(map(text_of, choices_of(answer))) == "a "
    assert "".join(row[0] for row in rows(answer)) == "a b c"
    if endpoint == "completions":
        assert [row[3] for row in rows(answer)] == [0, 1, 2, 3, 4]
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 5


@EITHER_WAY
def test_control_tokens_are_written_out_though_the_text_leaves_them_out(front: FrontEnd, stream: bool) -> None:
    says(front, [*tiny_text.ids("a"), tiny_text.special(tiny_text.START), *tiny_text.ids("b")], every=0.003)
    answer = ask(front, "completions", logprobs=0, stream=stream)
    assert "".join(map(text_of, choices_of(answer))) == "ab"
    assert [(row[0], row[3]) for row in rows(answer)] == [("a", 0), ("<|im_start|>", 1), ("b", 1)]
    answer = ask(front, "completions", logprobs=0, stream=stream, skip_special_tokens=False)
    assert [(row[0], row[3]) for row in rows(answer)] == [("a", 0), ("<|im_start|>", 1), ("b", 13)]


@EITHER_WAY
def test_every_choice_has_its_own(front: FrontEnd, stream: bool) -> None:
    def script(asked: Submission) -> Script:
        word = f"{asked.prompt[-1]}/{asked.seed % 1000}"
        ids, value = tiny_text.byte_ids(word.encode()), -(asked.seed % 1000) / 8
        table = [[(token, value)] for token in [*ids, 0]]
        every = 0.001 * (1 + asked.position % 3)
        return Script([*ids, tiny_text.special(tiny_text.END)], every=every, logprobs=table)

    front.device.script = script
    prompts = [tiny_text.ids("hello"), tiny_text.ids("fox")]
    seeds = [7, (7 + 0x9E3779B97F4A7C15) % 2**64]
    answer = post(
        front, "/v1/completions", prompt=prompts, n=2, seed=7, stream=stream, max_tokens=30, logprobs=0, stop=["zz"]
    )
    for index in range(4):
        seed = seeds[index % 2] % 1000
        word = f"{prompts[index // 2][-1]}/{seed}"
        assert [row[0] for row in rows(answer, index)] == list(word)
        assert {row[1] for row in rows(answer, index)} == {-seed / 8}
        assert [row[3] for row in rows(answer, index)] == list(range(len(word)))


@BOTH
def test_what_json_does_not_have(front: FrontEnd, endpoint: str) -> None:
    (a, b, c) = tiny_text.byte_ids(b"abc")
    says(front, [a], logprobs=[[(a, -math.inf), (b, 0.0), (c, -20_000.0)]])
    ((_, own, likely, _),) = rows(ask(front, endpoint, **wanted(endpoint, 2)))
    assert own == -9999.0
    if endpoint == "chat":
        likely = {one["token"]: one["logprob"] for one in likely}
    assert likely == {"b": 0.0, "c": -9999.0} | ({} if endpoint == "chat" else {"a": -9999.0})


def test_the_stream_says_nothing_else_than_the_answer(front: FrontEnd) -> None:
    """All bytes, two stop strings, odd pieces: whole and streamed answers have the same entries."""
    ids = tiny_text.byte_ids(bytes(range(0x20, 0x7F)) + "é漢😀".encode() + bytes(range(0x80, 0x90)))
    for endpoint in ("completions", "chat"):
        says(front, ids, every=0.0007)
        whole, streamed = (
            ask(front, endpoint, stop=["()*?", "xyz!"], max_tokens=200, stream=stream, **wanted(endpoint, 3))
            for stream in (False, True)
        )
        assert rows(whole) == rows(streamed)
        assert len(rows(whole)) == len(ids)
        if endpoint == "chat":
            assert [row[3] for row in rows(whole)] == [[byte_of(token)] for token in ids]


def test_asking_wrongly(front: FrontEnd) -> None:
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("completions", {"logprobs": -1}, "logprobs", "invalid_value"),
        ("completions", {"logprobs": 21}, "logprobs", "invalid_value"),
        ("completions", {"logprobs": True}, "logprobs", "invalid_type"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
        ("chat", {"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ("chat", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
        ("chat", {"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ("chat", {"logprobs": False, "top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ("chat", {"logprobs": 3}, "logprobs", "invalid_type"),
        ("chat", {"logprobs": True, "top_logprobs": 2.5}, "top_logprobs", "invalid_type"),
    ]
    for endpoint, fields, param, code in cases:
        answer = ask(front, endpoint, **fields)
        assert answer.status_code == 400, fields
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code), fields
    assert "'logprobs' must be true" in ask(front, "chat", top_logprobs=1).json()["error"]["message"]
    assert ask(front, "chat", top_logprobs=0).status_code == 200
