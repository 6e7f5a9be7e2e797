"""Log-probabilities of prompts: `echo` with `logprobs`, and `prompt_logprobs`."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from blink_proto.arena import Finish, SubmitFlag
from tests import tiny_text
from tests.front_end import FrontEnd
from tests.replay import Script, Submission
from tests.unit.test_dpu_logprobs import choices_of, rows, rows_of
from tests.unit.test_dpu_streams import ask, joined, post

EITHER_WAY = pytest.mark.parametrize("stream", [False, True])
BOS, END = tiny_text.special(tiny_text.BOS), tiny_text.special(tiny_text.END)


def value_of(token: int, place: int) -> float:
    """Of the scripted model, for a token of the prompt."""
    return -(token % 50 + 1) / 8 - place / 64


def says(front: FrontEnd, tokens: list[int], finish: Finish = Finish.STOP, **how: Any) -> None:
    """Each token of a prompt has a value of its own, and those after it in the vocabulary -0.125, -0.25, …"""

    def script(asked: Submission) -> Script:
        likely = [(k, -k / 8) for k in range(1, 21)]
        table = [
            [(t, value_of(t, i)), *(((t + k) % tiny_text.vocab_size(), value) for k, value in likely)]
            for i, t in enumerate(asked.prompt)
            if i
        ]
        return Script(tokens, finish, prompt_logprobs=table, **how)

    front.device.script = script


def complete(front: FrontEnd, prompt: Any, **fields: Any) -> httpx.Response:
    return post(front, "/v1/completions", **{"prompt": prompt, "max_tokens": 1, "echo": True, **fields})


@EITHER_WAY
def test_as_lm_eval_asks(front: FrontEnd, stream: bool) -> None:
    """It takes token_logprobs[context:-1] for the continuation: so a prompt of n tokens has n + 1 entries, whatever
    the device generated, the token that ends the sequence included."""
    ids = tiny_text.ids("the quick brown fox jumps")
    for generated, finish in ((tiny_text.byte_ids(b"!"), Finish.LENGTH), ([END], Finish.STOP)):
        says(front, generated, finish)
        answer = complete(front, [ids], logprobs=1, seed=1234, temperature=0, stream=stream)
        found = rows(answer)
        assert len(found) == len(ids) + 1
        assert found[0][1:3] == (None, None)
        assert [row[1] for row in found[1:-1]] == [value_of(t, i) for i, t in enumerate(ids) if i]
        for row, token in zip(found[1:-1], ids[1:], strict=True):
            likely = tiny_text.tokenizer().decode([token + 1])
            assert row[2] == pytest.approx({likely: -0.125, row[0]: row[1]})
        assert "".join(row[0] for row in found[:-1]) == "the quick brown fox jumps"
        assert front.device.submissions.pop().flags == SubmitFlag.PROMPT_LOGPROBS


@EITHER_WAY
def test_tokens_join_to_the_text_and_offsets_find_them_in_it(front: FrontEnd, stream: bool) -> None:
    text = "\n1. Carol has 20 é😀"
    says(front, tiny_text.byte_ids("漢!".encode()), Finish.LENGTH)
    answer = complete(front, text, logprobs=0, max_tokens=4, stream=stream, add_special_tokens=False)
    (shown, _), found = joined(answer), rows(answer)
    assert shown == text + "漢!"
    spelt = [row[0].removeprefix("bytes:") if row[0].startswith("bytes:") else row[0] for row in found]
    data = b"".join(one.encode("latin-1").decode("unicode_escape").encode("latin-1") for one in spelt)
    assert data.decode() == shown
    for row, after in zip(found, [*found[1:], (None, None, None, len(shown))], strict=True):
        if not row[0].startswith("bytes:"):
            assert shown[row[3] : after[3]] == row[0]


@EITHER_WAY
def test_bos_has_the_first_entry_and_no_text(front: FrontEnd, stream: bool) -> None:
    says(front, tiny_text.byte_ids(b"!"), Finish.LENGTH)
    found = rows(complete(front, "hello", logprobs=0, stream=stream))
    assert [(row[0], row[1] is None, row[3]) for row in found] == [
        ("<s>", True, 0),
        *((name, False, offset) for name, offset in places(tiny_text.ids("hello"))),
        ("!", False, 5),
    ]
    typed = complete(front, "a<|im_end|>b", logprobs=0, stream=stream)
    assert [(row[0], row[3]) for row in rows(typed)] == [("<s>", 0), ("a", 0), ("<|im_end|>", 1), ("b", 11), ("!", 12)]
    assert joined(typed)[0] == "a<|im_end|>b!"
    given = complete(front, [BOS, *tiny_text.byte_ids(b"a"), END], logprobs=0, stream=stream)
    assert [(row[0], row[3]) for row in rows(given)] == [("<s>", 0), ("a", 0), ("<|im_end|>", 1), ("!", 1)]
    assert joined(given)[0] == "a!"


def places(ids: list[int]) -> list[tuple[str, int]]:
    names = [tiny_text.tokenizer().decode([token]) for token in ids]
    return [(name, len("".join(names[:i]))) for i, name in enumerate(names)]


@EITHER_WAY
@pytest.mark.parametrize("prompt", ["hello there", [5], [[5, 6], [7]], "x" * 200])
def test_nothing_generated(front: FrontEnd, stream: bool, prompt: Any) -> None:
    says(front, tiny_text.byte_ids(b"abc"), every=0.05)
    answer = complete(front, prompt, logprobs=1, max_tokens=0, stream=stream)
    count = 2 if isinstance(prompt, list) and isinstance(prompt[0], list) else 1
    total = 0
    for index in range(count):
        found = rows(answer, index)
        total += len(found)
        assert found[0][1] is None
        assert None not in [row[1] for row in found[1:]]
        assert joined(answer, index)[1] == "length"
    if not stream:
        used = answer.json()["usage"]
        assert (used["prompt_tokens"], used["completion_tokens"]) == (total, 0)
    scored = [asked for asked in front.device.submissions if len(asked.prompt) > 1]
    assert all(asked.max_tokens == 0 for asked in scored), "the device is not made to generate"
    assert all(asked.flags == SubmitFlag.PROMPT_LOGPROBS for asked in scored)


@EITHER_WAY
def test_more_records_than_the_log_holds(front: FrontEnd, stream: bool) -> None:
    """200 tokens with 21 records and one of their own each, through a log of 256."""
    says(front, tiny_text.byte_ids(b"!"), Finish.LENGTH)
    ids = [3 + i % 50 for i in range(200)]
    found = rows(complete(front, ids, logprobs=20, stream=stream))
    assert [row[1] for row in found[1:-1]] == [value_of(t, i) for i, t in enumerate(ids) if i]


@EITHER_WAY
def test_every_choice_of_every_prompt(front: FrontEnd, stream: bool) -> None:
    says(front, tiny_text.byte_ids(b"!"), Finish.LENGTH, every=0.002)
    prompts = [tiny_text.ids("hello there"), tiny_text.ids("fox")]
    answer = complete(front, prompts, n=2, logprobs=0, stream=stream)
    for index in range(4):
        ids = prompts[index // 2]
        found = rows(answer, index)
        assert [row[1] for row in found[1:-1]] == [value_of(t, i) for i, t in enumerate(ids) if i]
        assert joined(answer, index)[0] == tiny_text.tokenizer().decode(ids) + "!"


def test_the_echo_comes_with_its_entries_in_a_stream(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"abc"), Finish.LENGTH, every=0.005)
    first, *others = choices_of(complete(front, "hello", logprobs=0, max_tokens=3, stream=True))
    assert first["text"].startswith("hello")
    assert "".join(row[0] for row in rows_of(first)) == "<s>" + first["text"]
    assert all("".join(row[0] for row in rows_of(one)) == one["text"] for one in others)
    ids = tiny_text.ids("the quick brown fox jumps over the lazy dog " * 9)
    pieces = choices_of(complete(front, ids, logprobs=20, max_tokens=3, stream=True))
    assert len(pieces) > 4, "the log holds the records of 11 tokens: a chunk for each look at it"
    assert all("".join(row[0] for row in rows_of(one)) == one["text"] for one in pieces)


def test_what_json_does_not_have(front: FrontEnd) -> None:
    ids = tiny_text.byte_ids(b"ab")
    front.device.script = lambda s: Script(ids, Finish.LENGTH, prompt_logprobs=[[(ids[1], -math.inf), (ids[0], 0.0)]])
    found = rows(complete(front, ids, logprobs=1))
    assert found[1][1:3] == (-9999.0, {"a": 0.0, "b": -9999.0})


# prompt_logprobs


def of_prompt(answer: httpx.Response, index: int = 0) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][index]["prompt_logprobs"]


def test_the_field_of_its_own(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"!"), Finish.LENGTH)
    ids = tiny_text.ids("hello there")
    answer = complete(front, ids, echo=False, prompt_logprobs=1)
    first, *others = of_prompt(answer)
    assert first is None
    assert len(others) == len(ids) - 1
    for place, (token, found) in enumerate(zip(ids[1:], others, strict=True), 1):
        name, likely = (tiny_text.tokenizer().decode([one]) for one in (token, token + 1))
        assert found == {
            str(token): {"logprob": value_of(token, place), "rank": 3, "decoded_token": name},
            str(token + 1): {"logprob": -0.125, "rank": 1, "decoded_token": likely},
        }
    assert joined(answer) == ("!", "length")
    assert answer.json()["choices"][0]["logprobs"] is None
    assert of_prompt(complete(front, [5], prompt_logprobs=1)) == [None]
    assert "prompt_logprobs" not in complete(front, ids).json()["choices"][0]


def test_both_fields_with_counts_of_their_own(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"!"), Finish.LENGTH)
    ids = tiny_text.ids("hello there")
    for logprobs, prompt_logprobs in ((0, 1), (1, 0)):
        answer = complete(front, ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        assert front.device.submissions.pop().logprobs == 2
        assert [len(found) for found in of_prompt(answer)[1:]] == [1 + prompt_logprobs] * (len(ids) - 1)
        assert [len(row[2]) for row in rows(answer)[1:-1]] == [1 + logprobs] * (len(ids) - 1)


def test_best_of_with_an_echo(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"!"), Finish.LENGTH)
    answer = complete(front, "hello", best_of=3, logprobs=1)
    assert joined(answer) == ("hello!", "length")
    assert len(rows(answer)) == 1 + len(tiny_text.ids("hello")) + 1


def test_the_field_in_chat(front: FrontEnd) -> None:
    """Once, beside the choices, of all that the template has written."""
    says(front, tiny_text.byte_ids(b"!"), Finish.LENGTH)
    answer = ask(front, "chat", prompt_logprobs=1, n=2, max_tokens=1)
    assert answer.status_code == 200
    body, prompt = answer.json(), front.device.submissions[-1].prompt
    assert [one.flags for one in front.device.submissions] == [SubmitFlag.PROMPT_LOGPROBS] * 2
    assert all("prompt_logprobs" not in choice for choice in body["choices"])
    first, *others = body["prompt_logprobs"]
    assert first is None
    assert body["usage"]["prompt_tokens"] == len(prompt) == 1 + len(others)
    for place, (token, found) in enumerate(zip(prompt[1:], others, strict=True), 1):
        assert found[str(token)]["logprob"] == value_of(token, place)
        assert found[str((token + 1) % tiny_text.vocab_size())]["rank"] == 1
    assert "prompt_logprobs" not in ask(front, "chat").json()
