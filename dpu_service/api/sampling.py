"""Sampling parameters: their ranges, and what the device gets."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from blink_proto import arena
from dpu_service.api.bias import Bias, read_bias
from dpu_service.api.errors import bad_value, context_length
from dpu_service.api.fields import MAX_STOP_CHARACTERS
from dpu_service.api.requests import CommonRequest
from dpu_service.channel.rings import Sampling

GREEDY_BELOW = 1e-3
"""Below it sampling is greedy: dividing logits by less gives one token all the mass, up to rounding."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: choices of one request get seeds far apart."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Choices:
    """How each choice of a request is made, except for its length."""

    count: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    bias: Bias
    logprobs: int

    def samplings(self, max_tokens: int) -> list[Sampling]:
        """One for each choice. Choice i of a given seed uses seed + i · 0x9E3779B97F4A7C15 (mod 2^64), so choice 0
        equals a request for one choice with that seed; without a seed each choice draws its own.

        Raises:
            ApiError: 400: fewer tokens than `min_tokens`.
        """
        if self.min_tokens > max_tokens:
            raise bad_value("min_tokens", f"'min_tokens' is over the {max_tokens} tokens to generate at most")
        return [
            Sampling(
                max_tokens=max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=secrets.randbits(64) if self.seed is None else (self.seed + i * _SEED_STEP) & _MASK,
                stop_tokens=self.stop_tokens,
                ignore_eos=self.ignore_eos,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                min_tokens=self.min_tokens,
                allow_only=self.bias.allow_only,
                logprobs=self.logprobs,
            )
            for i in range(self.count)
        ]


def read_choices(request: CommonRequest, vocab_size: int, logprobs: int) -> Choices:
    """Checks what is left beside the ranges in `fields`, and lengths, which come later.

    Args:
        logprobs: already checked, as `Sampling` has it.

    Raises:
        ApiError: 400, naming the field.
    """
    return Choices(
        count=1 if request.n is None else request.n,
        temperature=_temperature(request.temperature),
        top_p=_top_p(request.top_p),
        top_k=_top_k(request.top_k, vocab_size),
        seed=_seed(request.seed),
        stop_tokens=_stop_tokens(request.stop_token_ids or [], vocab_size),
        ignore_eos=bool(request.ignore_eos),
        min_p=request.min_p or 0.0,
        repetition_penalty=_repetition_penalty(request.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        min_tokens=request.min_tokens or 0,
        bias=read_bias(request.logit_bias, request.allowed_token_ids, vocab_size),
        logprobs=logprobs,
    )


def read_stops(request: CommonRequest) -> list[str]:
    """The stop strings.

    Raises:
        ApiError: 400: an empty one, or too long ones.
    """
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if not all(stops):
        raise bad_value("stop", "'stop' must not contain an empty string")
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise bad_value("stop", f"'stop' may have at most {MAX_STOP_CHARACTERS} characters in all")
    return stops


def fit_window(prompt_tokens: int, wanted: int | None, window: int, param: str, prompt_param: str) -> int:
    """Tokens to generate at most: `wanted`, or what the window leaves.

    Raises:
        ApiError: 400: `wanted` is below 1, or prompt and answer do not fit.
    """
    if wanted is not None and wanted < 1:
        raise bad_value(param, f"'{param}' must be at least 1")
    if prompt_tokens >= window:
        raise context_length(
            f"the prompt has {prompt_tokens} tokens, but the context window is {window} tokens for prompt and "
            f"answer together; use a shorter prompt",
            prompt_param,
        )
    if wanted is not None and prompt_tokens + wanted > window:
        raise context_length(
            f"{prompt_tokens} prompt tokens and {wanted} tokens to generate are over the context window of "
            f"{window} tokens; '{param}' may be at most {window - prompt_tokens} here",
            param,
        )
    return window - prompt_tokens if wanted is None else wanted


def _temperature(given: float | None) -> float:
    value = 1.0 if given is None else given
    return 0.0 if value < GREEDY_BELOW else value


def _top_p(given: float | None) -> float:
    return 1.0 if given is None else max(given, 1e-6)  # a smaller one could round to 0 in the device's float32


def _repetition_penalty(given: float | None) -> float:
    return 1.0 if given is None else max(given, 1e-6)  # 0 in the device's float32 would switch it off


def _top_k(given: int | None, vocab_size: int) -> int:
    return 0 if given is None or given < 0 or given >= vocab_size else given


def _seed(given: int | None) -> int | None:
    """A signed 64-bit number; the device takes its two's complement."""
    return None if given is None else given & _MASK


def _stop_tokens(given: list[int], vocab_size: int) -> tuple[int, ...]:
    unique = tuple(dict.fromkeys(given))
    if len(unique) > arena.MAX_STOP_TOKENS:
        raise bad_value("stop_token_ids", f"'stop_token_ids' may name at most {arena.MAX_STOP_TOKENS} tokens")
    if not all(0 <= token < vocab_size for token in unique):
        raise bad_value("stop_token_ids", f"'stop_token_ids' must be at least 0 and below {vocab_size}")
    return unique
