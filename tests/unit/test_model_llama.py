"""The layers against transformers, in float32 on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_runtime.model.source import ModelFolder, open_folder
from tests.models import Driver
from tests.tiny import FAMILIES, make_tiny, save_tiny

TOLERANCE = 1e-3
PROMPT = "The capital of France is Paris, and the capital of Germany is"


def reference_logits(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def reference_tokens(model, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, stop tokens ignored."""
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return made[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def reference(default_model: ModelFolder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model.path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # goes on past the end of a turn, as the driver does
    return model


@pytest.fixture(scope="module")
def prompts(default_model: ModelFolder) -> dict[int, list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_model.path / "tokenizer.json"))
    texts = [PROMPT, "Once upon a time", "def fibonacci(n):\n    ", "1, 2, 3, 4, 5, " * 6]
    return {slot: tokenizer.encode(text).ids for slot, text in enumerate(texts)}


def test_logits_of_the_default_model(default_model: ModelFolder, reference, prompts: dict[int, list[int]]) -> None:
    ids = prompts[3]
    driver = Driver(default_model)
    assert (driver.step({0: ids}, every=True) - reference_logits(reference, ids)).abs().max() < TOLERANCE


def test_logits_of_a_mixed_chunked_batch(default_model: ModelFolder, reference, prompts: dict[int, list[int]]) -> None:
    """Decodes and prompt chunks in one step: each row equals the row of a whole pass over its sequence."""
    driver = Driver(default_model)
    driver.step({0: prompts[0][:-1], 1: prompts[3][:7]})
    logits = driver.step({0: prompts[0][-1:], 1: prompts[3][7:20], 2: prompts[2]})
    expected = [reference_logits(reference, ids)[-1] for ids in (prompts[0], prompts[3][:20], prompts[2])]
    assert (logits - torch.stack(expected)).abs().max() < TOLERANCE


def test_64_greedy_tokens(default_model: ModelFolder, reference, prompts: dict[int, list[int]]) -> None:
    """The same tokens as transformers: alone, in a batch of mixed lengths, chunked and not."""
    expected = {slot: reference_tokens(reference, ids, 64) for slot, ids in prompts.items()}
    assert Driver(default_model).generate(prompts, 64) == expected
    assert Driver(default_model).generate(prompts, 64, chunk=5) == expected
    assert Driver(default_model).generate({0: prompts[0]}, 64) == {0: expected[0]}


def test_company_changes_no_bit(default_model: ModelFolder, prompts: dict[int, list[int]]) -> None:
    """Not only the tokens: the logits themselves are the same alone, in a batch, and after any chunking."""
    alone = Driver(default_model).step({0: prompts[0]})
    batch = Driver(default_model, slots=8).step({0: prompts[0], **{s: prompts[s % 4] for s in range(1, 8)}})
    chunked = Driver(default_model)
    chunked.step({0: prompts[0][:3]})
    chunked.step({0: prompts[0][3:8], 1: prompts[1]})
    last = chunked.step({0: prompts[0][8:]})
    assert torch.equal(alone[0], batch[0])
    assert torch.equal(alone[0], last[0])


def test_the_default_model_answers_like_itself(default_model: ModelFolder) -> None:
    """Catches a wrong order of the rotary pairs, which leaves shapes right and answers empty."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_model.path / "tokenizer.json"))
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France, and why is it famous?<|im_end|>\n<|im_start|>assistant\n"
    )
    made = Driver(default_model).generate({0: tokenizer.encode(text).ids}, 38)[0]
    assert tokenizer.decode(made).startswith("The capital of France is Paris.")
    assert made[-1] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_of_every_family(family: str, tmp_path: Path) -> None:
    folder = open_folder(save_tiny(tmp_path, family), "tiny")
    reference = make_tiny(family)
    torch.manual_seed(5)
    ids = torch.randint(3, 300, (150,)).tolist()
    driver = Driver(folder, slots=2, window=512)
    first = driver.step({0: ids[:100], 1: ids[:9]}, every=True)
    second = driver.step({0: ids[100:]}, every=True)
    assert (first[:100] - reference_logits(reference, ids)[:100]).abs().max() < TOLERANCE
    assert (first[100:] - reference_logits(reference, ids[:9])).abs().max() < TOLERANCE
    assert (second - reference_logits(reference, ids)[100:]).abs().max() < TOLERANCE
