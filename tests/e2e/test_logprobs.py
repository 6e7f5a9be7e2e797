"""Log-probabilities through the openai package, against transformers' own logits."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gpu_runtime.model.source import resolve_model
from tests.e2e.serving import Serving
from tests.tiny import make_tiny

TOLERANCE = 1e-3
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Name three animals, each with an emoji."}]
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 1.4, "seed": 11, "top_p": 0.95, "frequency_penalty": 0.5}
EITHER_WAY = pytest.mark.parametrize("stream", [False, True])


class Spelled:
    """Ids of a byte-level vocabulary by their bytes and by OpenAI's names for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        stand_ins = {character: byte for byte, character in bytes_to_unicode().items()}
        self.by_bytes = {}
        for token, number in tokenizer.get_vocab().items():
            own = all(character in stand_ins for character in token)
            data = bytes(stand_ins[character] for character in token) if own else token.encode()
            self.by_bytes[data] = number
        self.by_name = {name_of(data): number for data, number in self.by_bytes.items()}
        assert len(self.by_name) == len(tokenizer.get_vocab())


def name_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode(errors="backslashreplace")


@cache
def default_folder() -> Path:
    return resolve_model("smollm2-135m-instruct", lambda done, total, what: None).path


@pytest.fixture(scope="module")
def default_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(default_folder(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def default_spelled() -> Spelled:
    return Spelled(Tokenizer.from_file(str(default_folder() / "tokenizer.json")))


Row = tuple[int, float, dict[int, float]]
"""Token, its log-probability, and those of the likely ones."""


def of_completion(choices: list, spelled: Spelled) -> list[Row]:
    rows = []
    for found in (choice.logprobs for choice in choices if choice.logprobs is not None):
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
        for name, value, likely in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            rows.append((spelled.by_name[name], value, {spelled.by_name[one]: v for one, v in likely.items()}))
    return rows


def of_chat(choices: list, spelled: Spelled) -> list[Row]:
    rows = []
    for entry in (one for choice in choices if choice.logprobs is not None for one in choice.logprobs.content):
        assert name_of(bytes(entry.bytes)) in (entry.token, f"bytes:{entry.token}")
        likely = {spelled.by_bytes[bytes(one.bytes)]: one.logprob for one in entry.top_logprobs}
        assert list(likely.values()) == sorted(likely.values(), reverse=True)
        rows.append((spelled.by_bytes[bytes(entry.bytes)], entry.logprob, likely))
    return rows


def check(model: PreTrainedModel, prompt: list[int], rows: list[Row], top: int, own: bool) -> None:
    """Args: own: the sampled token stands among the likely ones even where it is none of them."""
    ids = [token for token, _, _ in rows]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    for (token, value, likely), wanted in zip(rows, logits.log_softmax(-1), strict=True):
        assert value == pytest.approx(wanted[token].item(), abs=TOLERANCE)
        assert likely == {one: pytest.approx(wanted[one].item(), abs=TOLERANCE) for one in likely}
        best = sorted(likely.values(), reverse=True)[:top]
        assert best == pytest.approx(wanted.topk(top).values.tolist(), abs=TOLERANCE)
        assert len(likely) in ((top, top + 1) if own else (top,))
        assert token in likely or not own


@EITHER_WAY
@pytest.mark.parametrize("how", [GREEDY, SAMPLED])
def test_completions_of_the_default_model(
    default_server: Serving, default_model: PreTrainedModel, default_spelled: Spelled, stream: bool, how: dict
) -> None:
    answer = default_server.client().completions.create(
        model=default_server.model, prompt=PROMPT, max_tokens=24, logprobs=5, stream=stream, **how
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    rows = of_completion(choices, default_spelled)
    assert len(rows) == 24
    tokenizer = Tokenizer.from_file(str(default_folder() / "tokenizer.json"))
    check(default_model, tokenizer.encode(PROMPT).ids, rows, 5, own=True)
    assert tokenizer.decode([token for token, _, _ in rows]) == "".join(choice.text for choice in choices)
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)


@EITHER_WAY
@pytest.mark.parametrize("how", [GREEDY, SAMPLED])
def test_chat_with_the_default_model(
    default_server: Serving, default_model: PreTrainedModel, default_spelled: Spelled, stream: bool, how: dict
) -> None:
    answer = default_server.client().chat.completions.create(
        model=default_server.model,
        messages=MESSAGES,
        max_completion_tokens=24,
        logprobs=True,
        top_logprobs=5,
        stream=stream,
        **how,
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    rows = of_chat(choices, default_spelled)
    if not stream:
        assert len(rows) == answer.usage.completion_tokens - (choices[0].finish_reason == "stop")
    tokenizer = AutoTokenizer.from_pretrained(str(default_folder()))
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    check(default_model, prompt, rows, 5, own=False)
    said = [choice.delta if stream else choice.message for choice in choices]
    assert tokenizer.decode([token for token, _, _ in rows]) == "".join(one.content or "" for one in said)


@pytest.mark.parametrize("top", [0, 20])
def test_bytes_of_a_random_model(tiny_server: Serving, tiny_model: Path, top: int) -> None:
    """Tokens are bytes and odd words, so that most text is broken characters; every choice of every prompt."""
    spelled = Spelled(Tokenizer.from_file(str(tiny_model / "tokenizer.json")))
    model, prompts = make_tiny("llama"), [[65, 66, 67], [100] * 40]
    fields = {"model": tiny_server.model, "prompt": prompts, "n": 2, "max_tokens": 40, "logprobs": top, "seed": 5}
    fields |= {"temperature": 1.0, "extra_body": {"ignore_eos": True}}
    client = tiny_server.client()
    whole = client.completions.create(**fields, stop=["zz"])
    pieces = [chunk.choices[0] for chunk in client.completions.create(**fields, stop=["zz"], stream=True)]
    for index in range(4):
        rows = of_completion([whole.choices[index]], spelled)
        assert len(rows) == 40
        check(model, prompts[index // 2], rows, top, own=True)
        own = [piece for piece in pieces if piece.index == index]
        assert of_completion(own, spelled) == rows
        assert "".join(piece.text for piece in own) == whole.choices[index].text


def test_prompts_of_a_random_model(tiny_server: Serving, tiny_model: Path) -> None:
    """What lm-eval asks for: prompts beside others, one of them longer than a step, all echoed with log-probabilities;
    whole and streamed, without an answer, and with the one that each gets without all that."""
    spelled = Spelled(Tokenizer.from_file(str(tiny_model / "tokenizer.json")))
    model, prompts = make_tiny("llama"), [[65, 66, 67], [100 + n % 100 for n in range(200)], [70, 71]]
    fields = {"model": tiny_server.model, "temperature": 0, "extra_body": {"ignore_eos": True}}
    client = tiny_server.client()
    alone = client.completions.create(**fields, prompt=prompts, max_tokens=7, logprobs=0)
    for stream, count in itertools.product((False, True), (0, 7)):
        asked = {**fields, "max_tokens": count, "stream": stream}
        answer = client.completions.create(**asked, prompt=prompts, echo=True, logprobs=3)
        choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
        for index, prompt in enumerate(prompts):
            said = [spelled.by_name[name] for name in alone.choices[index].logprobs.tokens][:count]
            check_echo(model, [*prompt, *said], [one for one in choices if one.index == index], spelled)


def check_echo(model: PreTrainedModel, tokens: list[int], choices: list, spelled: Spelled) -> None:
    found = [choice.logprobs for choice in choices if choice.logprobs is not None]
    values = [value for one in found for value in one.token_logprobs]
    likely = [entry for one in found for entry in one.top_logprobs]
    assert [spelled.by_name[name] for one in found for name in one.tokens] == tokens
    assert values[0] is None
    assert likely[0] is None
    rows = [
        (token, value, {spelled.by_name[one]: v for one, v in entry.items()})
        for token, value, entry in zip(tokens[1:], values[1:], likely[1:], strict=True)
    ]
    check(model, tokens[:1], rows, 3, own=True)
