"""Answers and streams of the real front end over a scripted device."""

from __future__ import annotations

import itertools
import json
import socket
import ssl
from typing import Any

import httpx
import openai
import pytest

from blink_proto.arena import ErrorCode, Finish
from tests import tiny_text
from tests.front_end import MODEL, FrontEnd, eventually
from tests.replay import Script, Submission

EMOJI = "a😀b漢c"


def says(front: FrontEnd, tokens: list[int], finish: Finish = Finish.STOP, **how: Any) -> None:
    """Every sequence says these; with STOP the end token comes after them."""
    spoken = [*tokens, tiny_text.special(tiny_text.END)] if finish is Finish.STOP else tokens
    front.device.script = lambda s: Script(spoken, finish, **how)


def post(front: FrontEnd, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(front.http + path, json={"model": MODEL, **fields}, timeout=20)


def ask(front: FrontEnd, endpoint: str, **fields: Any) -> httpx.Response:
    """`hi` to either endpoint."""
    if endpoint == "chat":
        return post(front, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **fields)
    return post(front, "/v1/completions", prompt="hi", **{"max_tokens": 100, **fields})


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, checked for its framing."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in answer.headers
    *parts, last, nothing = answer.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    assert all(part.startswith("data: {") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def joined(answer: httpx.Response, index: int = 0) -> tuple[str, str]:
    """Text and finish reason of a choice, from a stream or a whole answer; checks what every choice owes."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        (choice,) = [one for one in answer.json()["choices"] if one["index"] == index]
        return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]
    text, reasons = "", []
    for event in events(answer):
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            assert piece or choice["finish_reason"] or choice.get("delta", {}).get("role"), "a chunk that says nothing"
            assert not reasons, "a chunk after the last one"
            text += piece
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    (reason,) = reasons
    return text, reason


BOTH = pytest.mark.parametrize("endpoint", ["completions", "chat"])


@BOTH
@pytest.mark.parametrize(
    ("stream", "stop"), list(itertools.product([False, True], [None, ["User:\n", "Assistant:\n"], ["zzz"]]))
)
def test_every_way_of_asking_gives_the_same_text(front: FrontEnd, endpoint: str, stream: bool, stop: Any) -> None:
    says(front, tiny_text.byte_ids(f"{EMOJI} Alice!\nUser:\nno".encode()), every=0.001)
    text, reason = joined(ask(front, endpoint, stream=stream, stop=stop))
    whole = f"{EMOJI} Alice!\nUser:\nno"
    assert text == (f"{EMOJI} Alice!\n" if stop and "User:\n" in stop else whole)
    assert reason == "stop"


@BOTH
def test_no_piece_of_a_character_is_streamed(front: FrontEnd, endpoint: str) -> None:
    says(front, tiny_text.byte_ids("😀漢".encode()), every=0.003)
    answer = ask(front, endpoint, stream=True)
    assert "�" not in answer.text
    assert joined(answer) == ("😀漢", "stop")


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_the_end_token_first_gives_an_empty_valid_answer(front: FrontEnd, endpoint: str, stream: bool) -> None:
    says(front, [])
    answer = ask(front, endpoint, stream=stream, stream_options={"include_usage": True} if stream else None)
    assert joined(answer) == ("", "stop")
    used = events(answer)[-1]["usage"] if stream else answer.json()["usage"]
    assert used["completion_tokens"] == 1
    assert used["total_tokens"] == used["prompt_tokens"] + 1


def test_a_stop_string_over_several_tokens_is_neither_shown_nor_left_running(front: FrontEnd) -> None:
    ids = [*tiny_text.byte_ids(b"A B C D O P Q R S"), *tiny_text.byte_ids(b"x" * 50)]
    says(front, ids, Finish.NONE, every=0.002)
    answer = ask(front, "completions", stop=["O P Q"], stream=True)
    assert joined(answer) == ("A B C D ", "stop")
    eventually(lambda: front.device.playing == 0)
    assert len(front.device.cancelled) == 1


def test_held_text_is_sent_once(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b" Alice!"), every=0.002)
    assert joined(ask(front, "completions", stop=["\n", "Alice:"], stream=True)) == (" Alice!", "stop")


def test_a_length_finish_and_an_end_without_a_token(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"abcdefgh"), Finish.NONE)
    answer = ask(front, "completions", max_tokens=5)
    assert joined(answer) == ("abcde", "length")
    assert answer.json()["usage"]["completion_tokens"] == 5
    says(front, tiny_text.byte_ids(b"abc"), Finish.LENGTH, end_apart=True)
    assert joined(ask(front, "chat", stream=True)) == ("abc", "length")


def test_choices_of_several_prompts_have_their_own_indices(front: FrontEnd) -> None:
    def script(asked: Submission) -> Script:
        word = f"{asked.prompt[-1]}/{asked.seed % 1000}"
        return Script([*tiny_text.ids(word), tiny_text.special(tiny_text.END)], every=0.001 * (asked.position % 3))

    front.device.script = script
    step = 0x9E3779B97F4A7C15  # documented: choice i of seed s uses s + i * step mod 2^64
    seeds = [7, (7 + step) % 2**64]
    prompts = [tiny_text.ids("hello"), tiny_text.ids("fox")]
    wanted = [f"{prompt[-1]}/{seed % 1000}" for prompt in prompts for seed in seeds]
    for stream in (False, True):
        answer = post(front, "/v1/completions", prompt=prompts, n=2, seed=7, stream=stream, max_tokens=20)
        assert [joined(answer, index)[0] for index in range(4)] == wanted
    used = post(front, "/v1/completions", prompt=prompts, n=2, max_tokens=20).json()["usage"]
    assert used["prompt_tokens"] == len(prompts[0]) + len(prompts[1])


def test_without_a_seed_every_choice_draws_its_own(front: FrontEnd) -> None:
    ask(front, "chat", n=8)
    seeds = [asked.seed for asked in front.device.submissions]
    assert len(set(seeds)) == 8
    assert max(seeds) > 2**48


def test_usage_in_streams(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"abc"), every=0.003)
    chunks = events(ask(front, "chat", stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    for options in ({}, None, {"include_usage": False}):
        assert "usage" not in ask(front, "chat", stream=True, stream_options=options).text


def test_chat_streams_begin_with_the_role(front: FrontEnd) -> None:
    """Also those of a choice that begins when another one has."""
    said = tiny_text.byte_ids(b"abc")
    front.device.script = lambda s: Script(said, every=0.003, delay=0.05 * (s.position % 2))
    chunks = events(ask(front, "chat", stream=True, n=2))
    for index in range(2):
        own = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["role"] == "assistant"
        assert all("role" not in delta for delta in own[1:])


def test_an_error_in_a_stream_is_an_event_before_done(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"abc"), Finish.ERROR, end_apart=True, every=0.02, error=ErrorCode.BAD_SAMPLE)
    chunks = events(ask(front, "completions", stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "abc"
    assert chunks[-1]["error"]["type"] == "server_error"
    client = openai.OpenAI(base_url=front.http + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError):
        list(client.completions.create(model=MODEL, prompt="hi", stream=True))


def test_tokens_that_come_together_with_an_error_are_told_first(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"abc"), Finish.ERROR, end_apart=True, error=ErrorCode.BAD_SAMPLE)
    for kind in ("completions", "chat"):
        answer = ask(front, kind, stream=True)
        *chunks, last = events(answer)
        said = [chunk["choices"][0].get("text") or chunk["choices"][0]["delta"]["content"] for chunk in chunks]
        assert "".join(said) == "abc"
        assert "BAD_SAMPLE" in last["error"]["message"]
        assert ask(front, kind).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_byte_has_a_status(front: FrontEnd, stream: bool) -> None:
    front.device.script = lambda s: Script([], reject=True, error=ErrorCode.TOO_LARGE)
    answer = ask(front, "chat", stream=stream)
    assert answer.status_code == 500
    assert "TOO_LARGE" in answer.json()["error"]["message"]


@BOTH
def test_an_abort_by_the_device_is_no_natural_stop(front: FrontEnd, endpoint: str) -> None:
    says(front, tiny_text.byte_ids(b"abc"), Finish.CANCELLED, end_apart=True, every=0.02)
    assert ask(front, endpoint).status_code == 500
    *chunks, last = events(ask(front, endpoint, stream=True))
    assert last["error"]["type"] == "server_error"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


def test_an_error_of_one_choice_ends_the_stream_of_all(front: FrontEnd) -> None:
    bad = Script([], Finish.ERROR, end_apart=True, error=ErrorCode.BAD_SAMPLE, delay=0.05)
    front.device.script = lambda s: bad if s.position % 2 else Script(tiny_text.byte_ids(b"a" * 90), every=0.01)
    *_, last = events(ask(front, "completions", n=2, stream=True))
    assert "BAD_SAMPLE" in last["error"]["message"]
    eventually(lambda: front.device.playing == 0)


def test_a_failed_stream_counts_as_failed(front: FrontEnd) -> None:
    def failures() -> float:
        series = 'blink_completions_total{endpoint="chat",outcome="error"} '
        lines = httpx.get(front.http + "/metrics").text.splitlines()
        return sum(float(line.removeprefix(series)) for line in lines if line.startswith(series))

    says(front, tiny_text.byte_ids(b"abc"), Finish.ERROR, end_apart=True, every=0.02, error=ErrorCode.BAD_SAMPLE)
    before = failures()
    assert ask(front, "chat", stream=True).status_code == 200
    eventually(lambda: failures() == before + 1)


def test_the_openai_package_over_https(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(EMOJI.encode()), every=0.001)
    trust = httpx.Client(verify=ssl.create_default_context(cafile=front.certificate))
    client = openai.OpenAI(base_url=front.https + "/v1", api_key="none", http_client=trust)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages)
    assert whole.choices[0].message.content == EMOJI
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == EMOJI
    done = client.completions.create(model=MODEL, prompt="hi", max_tokens=100)
    assert done.choices[0].text == EMOJI


def test_what_the_device_is_asked(front: FrontEnd) -> None:
    ask(
        front,
        "completions",
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=-1,
        stop_token_ids=[5, 6, 5],
        ignore_eos=True,
        max_tokens=9,
    )
    (asked,) = front.device.submissions
    assert asked.prompt == (tiny_text.special(tiny_text.BOS), *tiny_text.ids("hi"))
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (0.5, 0.25, 7, 9)
    assert (asked.seed, asked.stop_tokens, asked.flags) == (2**64 - 1, (5, 6), 1)
    front.device.submissions.clear()
    ask(front, "completions", temperature=1e-4, max_tokens=None, top_k=-1)
    ask(front, "chat")
    plain, chat = front.device.submissions
    assert (plain.temperature, plain.max_tokens, plain.top_k, plain.flags) == (0.0, 16, 0, 0)
    assert (chat.temperature, chat.top_p) == (1.0, 1.0)
    assert chat.max_tokens == 256 - len(chat.prompt), "what the window leaves"


def test_what_few_ask_the_device_for(front: FrontEnd) -> None:
    ask(
        front,
        "completions",
        min_p=0.25,
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        min_tokens=3,
        logit_bias={"9": -100, "0": 1.5},
        n=2,
    )
    first, second = front.device.submissions
    assert (first.min_p, first.presence_penalty, first.frequency_penalty) == (0.25, -2, 0.5)
    assert (first.repetition_penalty, first.min_tokens, first.flags) == (1.5, 3, 0)
    assert first.bias == second.bias == ((0, 1.5), (9, -100))
    front.device.submissions.clear()
    ask(front, "chat", allowed_token_ids=[7, 3], logit_bias={"3": 2, "4": 1})
    ask(front, "chat")
    allowed, plain = front.device.submissions
    assert (allowed.bias, allowed.flags) == (((3, 2), (7, 0)), 2)
    assert (plain.bias, plain.flags, plain.min_p, plain.repetition_penalty, plain.min_tokens) == ((), 0, 0, 1, 0)


def test_chunked_framing_ends_cleanly(front: FrontEnd) -> None:
    says(front, tiny_text.byte_ids(b"abc"), every=0.002)
    host, port = front.http.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 9}).encode()
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(2):  # the connection stays usable
            raw.sendall(head.encode() + body)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += raw.recv(65536)
            assert received.count(b"data: [DONE]\n\n") == 1


def test_special_tokens_are_shown_when_wanted(front: FrontEnd) -> None:
    says(front, [*tiny_text.ids("a"), tiny_text.special(tiny_text.START), *tiny_text.ids("b")])
    assert joined(ask(front, "completions"))[0] == "ab"
    assert joined(ask(front, "completions", skip_special_tokens=False))[0] == "a<|im_start|>b"
