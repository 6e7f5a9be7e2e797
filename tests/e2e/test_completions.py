"""What completions are asked for, with the default model: the words are the model's own."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.serving import Serving

PROMPT = "The capital of France is"
SAMPLED = {"temperature": 1.2, "seed": 11, "max_tokens": 8}
EITHER_WAY = pytest.mark.parametrize("stream", [False, True])


def complete(server: Serving, **fields) -> list:
    return server.client().completions.create(model=server.model, **{"prompt": PROMPT, **fields}).choices


def test_the_best_of_several_are_those_with_the_best_mean(default_server: Serving) -> None:
    """A prompt's choices are the same whether all are answered or the best: their log-probabilities say which."""
    extra = {"extra_body": {"ignore_eos": True}}
    every = complete(default_server, n=6, logprobs=0, **SAMPLED, **extra)
    means = {one.text: sum(one.logprobs.token_logprobs) / len(one.logprobs.token_logprobs) for one in every}
    order = sorted(means, key=lambda text: means[text], reverse=True)
    best = complete(default_server, n=2, best_of=6, **SAMPLED, **extra)
    assert [one.text for one in best] == order[:2]


@EITHER_WAY
def test_an_echo_is_the_prompt_and_its_answer(default_server: Serving, stream: bool) -> None:
    """As text, as token ids, and with the answer's first tokens in the prompt."""
    ids = httpx.post(f"{default_server.http}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    fields = {"temperature": 0, "max_tokens": 8}
    (alone,) = complete(default_server, **fields)
    for prompt in (PROMPT, ids):
        choices = complete(default_server, prompt=prompt, echo=True, **fields)
        if stream:
            client = default_server.client()
            chunks = client.completions.create(
                model=default_server.model, prompt=prompt, echo=True, stream=True, **fields
            )
            choices = [chunk.choices[0] for chunk in chunks]
        assert "".join(choice.text for choice in choices) == PROMPT + alone.text
    text = httpx.post(f"{default_server.http}/detokenize", json={"tokens": ids}).json()
    assert text == {"prompt": PROMPT}


def test_a_banned_word_does_not_come(default_server: Serving) -> None:
    (free,) = complete(default_server, temperature=0, max_tokens=8)
    assert "Paris" in free.text
    (banned,) = complete(default_server, temperature=0, max_tokens=8, extra_body={"bad_words": ["Paris"]})
    assert "Paris" not in banned.text


@EITHER_WAY
def test_a_banned_word_of_several_tokens_is_not_completed(default_server: Serving, stream: bool) -> None:
    """The answer is the same up to the word's last token; log-probabilities go on telling what the model likes best."""
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logprobs": 1}
    (free,) = complete(default_server, **greedy)
    begun = free.logprobs.tokens[2:6]
    word = "".join(begun).lstrip(" ")
    fields = {"model": default_server.model, "prompt": PROMPT, "extra_body": {"bad_words": [word]}, **greedy}
    answer = default_server.client().completions.create(stream=stream, **fields)
    choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    best = [likely for choice in choices if choice.logprobs for likely in choice.logprobs.top_logprobs]
    assert word not in text
    assert tokens[:5] == free.logprobs.tokens[:5]
    assert tokens[5] != begun[3]
    assert max(best[5], key=best[5].__getitem__) == begun[3]


@EITHER_WAY
def test_the_token_that_ends_a_scored_prompt_has_its_entry(default_server: Serving, stream: bool) -> None:
    """lm-eval takes all but the last entry for the prompt's; here the device ends at once with a token it likes."""
    (likely,) = complete(default_server, temperature=0, max_tokens=1)
    (end,) = httpx.post(
        f"{default_server.http}/tokenize", json={"prompt": likely.text, "add_special_tokens": False}
    ).json()["tokens"]
    answer = default_server.client().completions.create(
        model=default_server.model,
        prompt=PROMPT,
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
        stream=stream,
        extra_body={"stop_token_ids": [end]},
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert choices[-1].finish_reason == "stop"
    assert "".join(choice.text for choice in choices) == PROMPT
    names = [name for choice in choices if choice.logprobs for name in choice.logprobs.tokens]
    assert "".join(names) == PROMPT + likely.text
