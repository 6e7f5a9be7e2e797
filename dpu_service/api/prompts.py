"""The prompts of a request as token ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from dpu_service.api.errors import ApiError, bad_value, context_length, invalid_json
from dpu_service.api.prompt_json import split_prompts
from dpu_service.text.encoder import TextEncoder, TextTooLongError


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and its text as the client wrote it where these are all its tokens."""

    tokens: list[int]
    text: str | None = None


@dataclass(frozen=True)
class PromptRules:
    """How prompts are read.

    Attributes:
        most: prompts that a request may have.
        window: tokens of a prompt at most.
        keep: so many last tokens count; None for all.
        add_special: BOS goes in front of a text where the model's tokenizer does so.
        bounded: a text over the window is refused without tokenising all of it.
    """

    vocab_size: int
    most: int
    window: int
    keep: int | None = None
    add_special: bool = True
    bounded: bool = True


async def completion_prompts(raw: bytes, encoder: TextEncoder, rules: PromptRules) -> list[Prompt]:
    """Each prompt: a text, a list of texts, a list of token ids, or a list of such lists.

    Args:
        raw: the field as JSON.

    Raises:
        ApiError: 400: another type, no prompt or an empty one, a token outside the vocabulary, or too long.
    """
    try:
        prompts = split_prompts(raw, rules.most)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(error) from error
    read = []
    for prompt in prompts:
        if isinstance(prompt, str):
            read.append(await read_text(prompt, encoder, rules))
            await asyncio.sleep(0)  # a long list of short texts must not hold up other requests
        else:
            read.append(Prompt(read_tokens(prompt, rules)))
        if not read[-1].tokens:
            raise bad_value("prompt", "'prompt' must have at least one token")
    return read


async def read_text(text: str, encoder: TextEncoder, rules: PromptRules) -> Prompt:
    """A prompt that was given as text.

    Raises:
        ApiError: 400: it cannot fit.
    """
    try:
        tokens = await encoder.encode_text(text, add_special=rules.add_special, bounded=rules.bounded)
    except TextTooLongError as error:
        raise too_long(error.at_least, rules.window, "prompt") from error
    kept = last_tokens(tokens, rules.keep)
    return Prompt(kept, text if kept is tokens else None)


def read_tokens(given: list[Any], rules: PromptRules, param: str = "prompt") -> list[int]:
    """Tokens that were given as such.

    Raises:
        ApiError: 400: too many, or one that is none.
    """
    tokens = last_tokens(given, rules.keep)
    if len(tokens) > rules.window:
        raise too_long(len(tokens), rules.window, param)
    if not all(type(token) is int for token in tokens):
        raise bad_value(param, f"'{param}' must hold whole numbers where it holds token ids")
    if not all(0 <= token < rules.vocab_size for token in tokens):
        raise bad_value(param, f"'{param}' holds a token id that is not between 0 and {rules.vocab_size - 1}")
    return tokens


def last_tokens(tokens: list[int], keep: int | None) -> list[int]:
    """So many last ones; all for None."""
    return tokens if keep is None or len(tokens) <= keep else tokens[len(tokens) - keep :]


def too_long(at_least: int, window: int, param: str) -> ApiError:
    """400 for a prompt that has at least so many tokens."""
    return context_length(
        f"the prompt is too long: it has at least {max(at_least, window + 1)} tokens, and this model's maximum context "
        f"length is {window} tokens, prompt and answer together",
        param,
    )
