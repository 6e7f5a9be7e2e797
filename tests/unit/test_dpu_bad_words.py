"""What `bad_words` ask of the device, over a scripted one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from blink_proto import arena
from tests import tiny_text
from tests.front_end import FrontEnd, eventually, front_end, make_device
from tests.replay import Submission
from tests.unit.test_dpu_streams import ask, post

BOTH_ROUTES = pytest.mark.parametrize("route", ["plain", "chat"])


def asked(front: FrontEnd, route: str = "plain", **fields: Any) -> Submission:
    """What the device is asked for."""
    front.device.submissions.clear()
    assert ask(front, route, **fields).status_code == 200
    return front.device.submissions.pop()


def refused(front: FrontEnd, **fields: Any) -> tuple[int, str, str]:
    """Status, field and message."""
    front.device.submissions.clear()
    answer = ask(front, "plain", **fields)
    assert not front.device.submissions
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def token(name: str) -> int:
    return int(tiny_text.tokenizer().token_to_id(name))


@BOTH_ROUTES
def test_single_tokens_are_banned_bare_and_behind_a_space(front: FrontEnd, route: str) -> None:
    both = {token("the"): -math.inf, token("Ġthe"): -math.inf}
    for word in ("the", " the"):
        found = asked(front, route, bad_words=[word])
        assert (found.bias, found.bans) == (tuple(sorted(both.items())), ())
    (letter,) = tiny_text.byte_ids(b"t")
    found = asked(front, route, logit_bias={str(token("the")): 5, "9": 1}, bad_words=["the", "t"])
    wanted = both | {letter: -math.inf, 9: 1.0}
    assert (found.bias, found.bans) == (tuple(sorted(wanted.items())), ()), "' t' is a space and the banned 't'"


def test_banned_tokens_are_taken_off_the_allowed_ones(front: FrontEnd) -> None:
    (letter,) = tiny_text.byte_ids(b"t")
    assert asked(front, bad_words=["t"], allowed_token_ids=[letter, 9]).bias == ((9, 0.0),)
    assert refused(front, bad_words=["t"], allowed_token_ids=[letter])[:2] == (400, "bad_words")


@BOTH_ROUTES
@pytest.mark.parametrize("space", ["", " ", "  "])
def test_words_of_several_tokens_are_banned_as_sequences(front: FrontEnd, route: str, space: str) -> None:
    """'fox' is two tokens, and one behind a space; of 'é' and 'describe' the spaced form only adds a space."""
    found = asked(front, route, bad_words=[space + word for word in ("fox", "é", "describe", "fox")])
    bytes_of = [tuple(tiny_text.byte_ids(word.encode())) for word in ("é", "describe")]
    assert found.bans == ((token("fo"), *tiny_text.byte_ids(b"x")), *bytes_of)
    assert found.bias == ((token("Ġfox"), -math.inf),)


def test_both_forms_of_a_word_of_several_tokens(front: FrontEnd) -> None:
    end = tuple(tiny_text.byte_ids(b" end"))
    assert asked(front, bad_words=["the end"]).bans == ((token("the"), *end), (token("Ġthe"), *end))
    assert asked(front, bad_words=["the end", "n"]).bans == (), "without 'n' there is no end"


def test_choices_share_what_is_banned(front: FrontEnd) -> None:
    front.device.submissions.clear()
    assert ask(front, "plain", bad_words=["é"], n=3, logit_bias={"7": 1}).status_code == 200
    assert [(one.bias, len(one.bans)) for one in front.device.submissions] == [(((7, 1.0),), 1)] * 3


def test_words_that_cannot_be_banned_are_refused_by_name(front: FrontEnd) -> None:
    status, param, message = refused(front, bad_words=["t", "t" * 257])
    assert (status, param) == (400, "bad_words[1]")
    assert "256 characters" in message
    assert asked(front, bad_words=["t", "x" * 256]).bans == (tuple(tiny_text.byte_ids(b"x" * 256)),)
    assert refused(front, bad_words=["a", "  "])[:2] == (400, "bad_words")
    assert refused(front, bad_words=["a"] * 513)[:2] == (400, "bad_words")


def test_banned_sequences_have_a_limit(front: FrontEnd) -> None:
    """Three words of 256 letters and one of 252 are 1,020 tokens and 4 lengths."""
    words = [letter * 256 for letter in "zxw"] + ["q" * 252]
    assert sum(1 + len(one) for one in asked(front, bad_words=words).bans) == 1024
    status, param, message = refused(front, bad_words=[*words[:3], "q" * 253])
    assert (status, param) == (400, "bad_words")
    assert "1024" in message
    eventually(lambda: front.device.playing == 0)
    assert front.device.channels[0].protocol_errors == 0


def test_a_prompt_has_the_room_that_banned_sequences_leave() -> None:
    """In a heap of 256 tokens 100 words leave room for a window of 157."""
    device = make_device(sizes=arena.Sizes(4, 64, 64, 256, 256))
    body = {"prompt": [9] * 100, "bad_words": ["z" * 99]}
    with front_end("--workers", "1", "--no-access-log", device=device) as running:
        assert post(running, "/v1/completions", **body, max_tokens=57).status_code == 200
        assert len(device.submissions.pop().bans[0]) == 99
        answer = post(running, "/v1/completions", **body, max_tokens=58)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
