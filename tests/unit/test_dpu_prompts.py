"""Prompts of completions as they are read, without a server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from dpu_service.api.errors import ApiError
from dpu_service.api.prompt_json import split_prompts
from dpu_service.api.prompts import PromptRules, completion_prompts
from dpu_service.text.bundle import TextBundle
from dpu_service.text.encoder import TextEncoder
from tests import tiny_text

V = tiny_text.vocab_size()


def encoder(bos: bool) -> TextEncoder:
    source = json.loads(tiny_text.files()["tokenizer.json"])
    if not bos:
        source["post_processor"] = None
    return TextEncoder(TextBundle({**tiny_text.files(), "tokenizer.json": json.dumps(source).encode()}), window=100)


def read(given: Any, bos: bool = True, most: int = 4, **rules: Any) -> list[list[int]]:
    raw = given if isinstance(given, bytes) else json.dumps(given).encode()
    prompts = asyncio.run(completion_prompts(raw, encoder(bos), PromptRules(V, most, 100, **rules)))
    return [prompt.tokens for prompt in prompts]


def refusal(given: Any, bos: bool = True, most: int = 4) -> tuple[int, str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        read(given, bos, most)
    return caught.value.status, caught.value.param, caught.value.code


def test_the_four_kinds() -> None:
    bos, hello = tiny_text.special(tiny_text.BOS), tiny_text.ids("hello")
    assert read("hello") == [[bos, *hello]]
    assert read("hello", bos=False) == [hello]
    assert read(["hello", ""]) == [[bos, *hello], [bos]]
    assert read([1, V - 1]) == [[1, V - 1]]
    assert read([[1], [2, 3]]) == [[1], [2, 3]]
    assert read(b" [ [1] ,[2, 3 ] ] ".strip()) == [[1], [2, 3]]
    assert read([[1, 2, 3], [4]], keep=2) == [[2, 3], [4]]


@pytest.mark.parametrize("given", ["", [""], ["a", ""], [], [[]], [[1], []]])
def test_empty_prompts_where_the_tokenizer_adds_no_bos(given: Any) -> None:
    assert refusal(given, bos=False) == (400, "prompt", "invalid_value")


@pytest.mark.parametrize(
    "given", [None, True, 5, 1.5, {}, {"a": [1]}, [1, "a"], ["a", [1]], [[1], 2], [["a"]], [[[1]]], [1.0], [-1], [V]]
)
def test_what_is_no_prompt(given: Any) -> None:
    assert refusal(given) == (400, "prompt", "invalid_value")


def test_strings_that_are_none() -> None:
    assert refusal(b'"\\ud800"') == (400, None, "invalid_json")
    assert refusal(b'["\xff"]') == (400, None, "invalid_json")


@pytest.mark.parametrize(
    "raw", [b"[" + b",".join([b"[1]"] * 2_000_000) + b"]", b"[" * 4_000_000 + b"]" * 4_000_000], ids=["many", "deep"]
)
def test_millions_of_lists_are_refused_without_being_made(raw: bytes) -> None:
    began = time.process_time()
    assert refusal(raw) == (400, "prompt", "invalid_value")
    assert time.process_time() - began < 0.25, "decoding them takes half a second and more"


def test_brackets_in_texts_are_no_lists() -> None:
    assert split_prompts(b'["[[[[[[[[","]"]', 2) == ["[[[[[[[[", "]"]
    assert split_prompts(b'"[[[["', 1) == ["[[[["]
