"""What plain completions can be asked for, over a scripted device."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from blink_proto.arena import Finish
from tests import tiny_text
from tests.front_end import FrontEnd, eventually
from tests.replay import Script, Submission
from tests.unit.test_dpu_logprobs import rows
from tests.unit.test_dpu_streams import ask, events, joined, post, says

EITHER_WAY = pytest.mark.parametrize("stream", [False, True])
BOS = tiny_text.special(tiny_text.BOS)
STEP = 0x9E3779B97F4A7C15
"""Documented: choice i of seed s uses s + i * STEP mod 2^64."""


def complete(front: FrontEnd, prompt: Any, **fields: Any) -> httpx.Response:
    return post(front, "/v1/completions", **{"prompt": prompt, "max_tokens": 20, **fields})


def asked_prompt(front: FrontEnd) -> tuple[int, ...]:
    return front.device.submissions.pop().prompt


# echo


@EITHER_WAY
def test_echo_puts_the_prompt_in_front_of_every_choice(front: FrontEnd, stream: bool) -> None:
    says(front, tiny_text.byte_ids("b😀".encode()), every=0.002)
    answer = complete(front, ["hello ", "é"], n=2, echo=True, stream=stream)
    assert [joined(answer, index) for index in range(4)] == [("hello b😀", "stop")] * 2 + [("éb😀", "stop")] * 2
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 4 * 6


@EITHER_WAY
def test_echo_of_token_ids_is_their_text(front: FrontEnd, stream: bool) -> None:
    ids = [BOS, *tiny_text.ids("hello there"), tiny_text.special(tiny_text.END)]
    says(front, tiny_text.byte_ids(b"!"))
    assert joined(complete(front, ids, echo=True, stream=stream))[0] == "hello there!"
    shown = complete(front, ids, echo=True, stream=stream, skip_special_tokens=False)
    assert joined(shown)[0] == "<s>hello there<|im_end|>!<|im_end|>"[: -len("<|im_end|>")]
    assert joined(complete(front, "a<|im_end|>b", echo=True, stream=stream))[0] == "a<|im_end|>b!"


@EITHER_WAY
def test_a_character_that_the_prompt_begins_comes_whole(front: FrontEnd, stream: bool) -> None:
    emoji = tiny_text.byte_ids("😀".encode())
    says(front, [*emoji[2:], *tiny_text.byte_ids(b"!")], every=0.002)
    prompt = [*tiny_text.ids("a"), *emoji[:2]]
    assert joined(complete(front, prompt, stream=stream))[0] == "😀!"
    assert joined(complete(front, prompt, stream=stream, echo=True))[0] == "a😀!"
    says(front, tiny_text.byte_ids(b"!"), every=0.002)
    assert joined(complete(front, prompt, stream=stream))[0] == "!"
    assert joined(complete(front, prompt, stream=stream, echo=True))[0] == "a\ufffd!"


@EITHER_WAY
def test_nothing_but_the_prompt(front: FrontEnd, stream: bool) -> None:
    says(front, tiny_text.byte_ids(b"xyz"), every=0.05)
    answer = complete(front, "hello", echo=True, max_tokens=0, stream=stream)
    assert joined(answer) == ("hello", "length")
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 0
    eventually(lambda: front.device.playing == 0)
    assert complete(front, "hello", max_tokens=0).json()["error"]["param"] == "max_tokens"


def test_stop_strings_are_not_looked_for_in_the_echo(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"ab stop c"))
    assert joined(complete(front, "do not stop", echo=True, stop=["stop"])) == ("do not stopab ", "stop")
    assert joined(complete(front, "do not st", echo=True, stop=["sta"])) == ("do not stab stop c", "stop")


# best_of


def scripted_scores(front: FrontEnd, scores: dict[int, float], stop_score: float) -> None:
    """Choice i of seed 7 says its own number, with this log-probability; the token that ends it has another."""
    numbers = {(7 + i * STEP) % 2**64: i for i in range(8)}

    def script(asked: Submission) -> Script:
        number = numbers[asked.seed]
        ids = tiny_text.byte_ids(str(number).encode() * (1 + number))
        table = [[(token, scores[number])] for token in ids]
        end = tiny_text.special(tiny_text.END)
        return Script([*ids, end], logprobs=[*table, [(end, stop_score)]], every=0.001 * (number % 3))

    front.device.script = script


def test_the_best_of_several_by_mean_log_probability(front: FrontEnd) -> None:
    """Means: choice 0 of 2 tokens (-4 - 1) / 2, choice 1 of 3 (-0.5 - 0.5 - 1) / 3, and so on."""
    scores = {0: -4.0, 1: -0.5, 2: -3.0, 3: -1.5}
    scripted_scores(front, scores, -1.0)
    means = {i: ((i + 1) * score - 1.0) / (i + 2) for i, score in scores.items()}
    order = sorted(means, key=lambda i: means[i], reverse=True)
    answer = complete(front, ["a", "b"], best_of=4, n=2, seed=7)
    texts = [joined(answer, index)[0] for index in range(4)]
    assert texts == [str(i) * (1 + i) for i in order[:2]] * 2
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer.json()["choices"])
    assert answer.json()["usage"]["completion_tokens"] == 2 * (2 + 3 + 4 + 5), "all that were generated"
    assert [asked.logprobs for asked in front.device.submissions] == [1] * 8


def test_best_of_with_log_probabilities_shown_and_stop_strings(front: FrontEnd) -> None:
    """Tokens behind a stop string do not count: choice 2's are bad there."""
    numbers = {(7 + i * STEP) % 2**64: i for i in range(3)}

    def script(asked: Submission) -> Script:
        number = numbers[asked.seed]
        ids = tiny_text.byte_ids(b"%d!yyyy" % number)
        values = [[-2.0, -1.0, -0.1][number], -0.5, *[-50.0 if number == 2 else 0.0] * 4]
        return Script(ids, Finish.LENGTH, logprobs=[[(t, v)] for t, v in zip(ids, values, strict=False)])

    front.device.script = script
    answer = complete(front, "a", best_of=3, seed=7, stop="!", logprobs=0)
    assert joined(answer) == ("2", "stop")
    assert [row[:2] for row in rows(answer)] == [("2", pytest.approx(-0.1)), ("!", -0.5)]


def test_best_of_and_n_alike_is_no_choice(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"a"))
    for stream in (False, True):
        answer = complete(front, "a", best_of=2, n=2, stream=stream)
        assert [joined(answer, index)[0] for index in range(2)] == ["a", "a"]
    assert all(asked.logprobs == 0 for asked in front.device.submissions)
    for fields in ({"best_of": 2, "stream": True}, {"best_of": 1, "n": 2}):
        answer = complete(front, "a", **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")


def test_many_choices(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"a"))
    answer = complete(front, "a", n=128, stream=True)
    assert all(joined(answer, index) == ("a", "stop") for index in range(128))
    assert len({asked.seed for asked in front.device.submissions}) == 128


# prompts


def test_the_last_tokens_of_a_prompt(front: FrontEnd) -> None:
    ids = tiny_text.ids("the quick brown fox")
    assert complete(front, "the quick brown fox", truncate_prompt_tokens=3, echo=True).status_code == 200
    assert asked_prompt(front) == tuple(ids[-3:])
    assert complete(front, [ids, ids[:2]], truncate_prompt_tokens=3).status_code == 200
    assert sorted(asked.prompt for asked in front.device.submissions) == sorted([tuple(ids[-3:]), tuple(ids[:2])])
    front.device.submissions.clear()
    long = list(range(10, 310))
    assert complete(front, long, truncate_prompt_tokens=-1, max_tokens=56).status_code == 200
    assert asked_prompt(front) == tuple(long[-200:]), "what the window of 256 leaves"
    messages = [{"role": "user", "content": "the quick brown fox"}]
    assert post(front, "/v1/chat/completions", messages=messages, truncate_prompt_tokens=4).status_code == 200
    assert len(asked_prompt(front)) == 4
    front.device.script = lambda s: Script(tiny_text.byte_ids(b"!"), Finish.LENGTH)
    answer = complete(front, "the quick brown fox", truncate_prompt_tokens=2, echo=True)
    assert joined(answer)[0] == tiny_text.tokenizer().decode(ids[-2:]) + "!", "the text of what counted"


def test_bos_only_where_it_is_wanted(front: FrontEnd) -> None:
    for fields, in_front in (({}, [BOS]), ({"add_special_tokens": True}, [BOS]), ({"add_special_tokens": False}, [])):
        assert complete(front, "hello", **fields).status_code == 200
        assert asked_prompt(front) == (*in_front, *tiny_text.ids("hello"))
    assert complete(front, "<s>hello").status_code == 200
    assert asked_prompt(front) == (BOS, *tiny_text.ids("hello"))
    assert complete(front, "", add_special_tokens=False).json()["error"]["param"] == "prompt"


# what ends an answer


@EITHER_WAY
def test_the_stop_string_may_be_kept(front: FrontEnd, stream: bool) -> None:
    says(front, tiny_text.byte_ids(b"ab stop c"), Finish.NONE, every=0.002)
    fields = {"stop": ["zz", "b st"], "stream": stream}
    assert joined(complete(front, "hi", **fields)) == ("a", "stop")
    assert joined(complete(front, "hi", include_stop_str_in_output=True, **fields)) == ("ab st", "stop")


@EITHER_WAY
def test_no_stop_of_any_sort_before_min_tokens(front: FrontEnd, stream: bool) -> None:
    """Stop tokens are the device's to hold off; it is told. A token a byte."""
    says(front, tiny_text.byte_ids(b"\na\nb\nc"), every=0.002)
    answer = complete(front, "hi", stop=["\n"], stop_token_ids=[5], min_tokens=3, stream=stream)
    assert joined(answer) == ("\na\nb", "stop")
    asked = front.device.submissions[0]
    assert (asked.min_tokens, asked.stop_tokens, asked.flags) == (3, (5,), 0)


def test_a_stop_string_over_four_tokens_in_a_stream(front: FrontEnd) -> None:
    words = ["Hel", "lo", " th", "e f", "ox ju", "mps"]
    ids = [token for word in words for token in tiny_text.ids(word)]
    says(front, ids, Finish.NONE, every=0.003)
    answer = complete(front, "hi", stop=["lo the fox j"], stream=True)
    assert joined(answer) == ("Hel", "stop")
    assert "lo" not in "".join(chunk["choices"][0]["text"] for chunk in events(answer))


def test_a_seed_means_the_same_under_load(front: FrontEnd) -> None:
    """Twelve at once: each sequence has the seed alone, whatever else runs."""
    says(front, tiny_text.byte_ids(b"abc"), every=0.002)
    clients = [threading.Thread(target=complete, args=(front, "hi"), kwargs={"seed": 1}) for _ in range(12)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert [asked.seed for asked in front.device.submissions] == [1] * 12


# how tokens are written


def test_tokens_as_ids(front: FrontEnd) -> None:
    (a, b) = tiny_text.byte_ids(b"ab")
    front.device.script = lambda s: Script([a], Finish.LENGTH, logprobs=[[(a, -0.5), (b, -0.25)]])
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True}
    found = rows(complete(front, "hi", logprobs=1, **fields))
    assert found == [(f"token_id:{a}", -0.5, {f"token_id:{b}": -0.25, f"token_id:{a}": -0.5}, 0)]
    ((token, _, (likely,), data),) = rows(ask(front, "chat", logprobs=True, top_logprobs=1, **fields))
    assert (token, likely["token"], data) == (f"token_id:{a}", f"token_id:{b}", [97])


def test_a_class_reaches_the_device_and_none_goes_before_the_default(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"b"))
    assert complete(front, "a", priority=7).status_code == 200
    assert complete(front, "a").status_code == 200
    assert [asked.priority for asked in front.device.submissions] == [7, 0]
    refused = complete(front, "a", priority=-1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
