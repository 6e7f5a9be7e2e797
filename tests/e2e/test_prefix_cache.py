"""The prefix cache of the soft GPU: the same answers with it and without, and fewer prompt tokens computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Serving, serving

SYSTEM = "You are a helpful assistant of a small library. You know its books, its opening hours and its rules. " * 3
QUESTIONS = ("When do you open?", "May I bring my dog?", "Which book is the oldest one?")
BLOCK = 16


@pytest.fixture(scope="module")
def cached(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("cached"), str(tiny_model), "tiny") as started:
        yield started


@pytest.fixture(scope="module")
def uncached(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("uncached")
    with serving(folder, str(tiny_model), "tiny", ("--gpu-args", "--no-prefix-cache")) as started:
        yield started


def complete(server: Serving, prompt: str, **fields) -> dict:
    body = {"model": server.model, "prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.http}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def computed(server: Serving) -> float:
    return server.metric("blink_device_prompt_tokens_total")


def test_answers_are_the_same_from_the_cache_and_without(cached: Serving, uncached: Serving) -> None:
    """Greedy, each prompt twice, and then with its answer and one more question behind it: every token."""
    for question in QUESTIONS:
        prompt, answers = f"{SYSTEM}{question}", []
        for server in (uncached, cached):
            first, again = complete(server, prompt), complete(server, prompt)
            longer = complete(server, prompt + first["choices"][0]["text"] + QUESTIONS[0])
            answers.append([one["choices"][0]["text"] for one in (first, again, longer)])
        assert answers[0] == answers[1]
        assert answers[1][0] == answers[1][1]
    assert uncached.metric("blink_device_prefix_cache_hits_total") == 0
    assert cached.metric("blink_device_prefix_cache_hits_total") > 0


def test_a_prompt_is_computed_once(cached: Serving) -> None:
    """The second time only what is behind its last full block is, its last token in any case."""
    prompt = SYSTEM + "Whose book is this?"
    before = computed(cached)
    first = complete(cached, prompt)
    tokens = first["usage"]["prompt_tokens"]
    known = first["usage"].get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]
    assert computed(cached) - before == tokens - known
    before, hits = computed(cached), cached.metric("blink_device_prefix_cache_hits_total")
    second = complete(cached, prompt)
    found = (tokens - 1) // BLOCK * BLOCK
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": found}
    assert computed(cached) - before == tokens - found
    assert cached.metric("blink_device_prefix_cache_hits_total") - hits == found


def test_a_salt_keeps_prompts_apart(cached: Serving) -> None:
    prompt = SYSTEM + "Who reads here?"
    complete(cached, prompt)
    assert "prompt_tokens_details" not in complete(cached, prompt, cache_salt="mine")["usage"]
    assert "prompt_tokens_details" in complete(cached, prompt, cache_salt="mine")["usage"]


def test_what_is_cached_does_not_count_as_used(cached: Serving) -> None:
    complete(cached, SYSTEM)
    cached.wait_metric("blink_device_kv_blocks_used", 0)
    assert cached.metric("blink_device_kv_blocks_cached") > 0
    assert cached.metric("blink_device_kv_usage_ratio") == 0


def test_a_conversation_computes_only_what_is_new(default_server: Serving) -> None:
    """The answer of one turn is part of the next one's prompt: what was computed as it was generated is found too."""
    client, greedy = default_server.client(), {"model": default_server.model, "temperature": 0}
    said = [{"role": "user", "content": "Count from one to thirty, in words."}]
    first = client.chat.completions.create(messages=said, max_tokens=48, **greedy)
    said += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Why?"}]
    second = client.chat.completions.create(messages=said, max_tokens=4, **greedy)
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens >= first.usage.prompt_tokens + 16
