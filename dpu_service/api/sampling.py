"""Sampling parameters: their ranges, and what the device gets."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from dpu_service.api.bias import Bias
from dpu_service.api.errors import bad_value, context_length
from dpu_service.api.fields import MAX_STOP_CHARACTERS
from dpu_service.api.logprobs import Asked
from dpu_service.api.requests import CommonRequest
from dpu_service.channel.rings import Sampling
from dpu_service.sequences.pump import Wanted
from dpu_service.text.choice import TextRules

GREEDY_BELOW = 1e-3
"""Below it sampling is greedy: dividing logits by less gives one token all the mass, up to rounding."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: choices of one request get seeds far apart."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Counts:
    """Choices of each prompt: how many are made, and how many of them answered."""

    made: int
    answered: int


@dataclass(frozen=True)
class Choices:
    """How each choice of a request is made, except for its length and its seed, which `common` leaves open."""

    count: int
    seed: int | None
    bias: Bias
    common: Sampling
    scores_prompt: bool = False

    def wanted(self, prompt: Items[int], max_tokens: int) -> Wanted:
        """What the device is asked for; see `samplings`."""
        samplings = self.samplings(max_tokens, len(prompt))
        return Wanted(prompt, samplings, self.bias.entries, self.bias.banned.sequences)

    def samplings(self, max_tokens: int, prompt_tokens: int) -> list[Sampling]:
        """One for each choice. Choice i of a given seed uses seed + i · 0x9E3779B97F4A7C15 (mod 2^64), so choice 0
        equals a request for one choice with that seed; without a seed each choice draws its own.

        Args:
            max_tokens: where it is 0 the device may still generate one: it can do with none only if it has
                log-probabilities of the prompt to give.

        Raises:
            ApiError: 400: fewer tokens than `min_tokens`.
        """
        if self.common.min_tokens > max_tokens:
            raise bad_value("min_tokens", f"'min_tokens' is over the {max_tokens} tokens to generate at most")
        scored = self.scores_prompt and prompt_tokens > 1  # nothing gives the first one's
        common = replace(self.common, max_tokens=max_tokens or int(not scored), prompt_logprobs=scored)
        return [replace(common, seed=self._seed(i)) for i in range(self.count)]

    def _seed(self, choice: int) -> int:
        return secrets.randbits(64) if self.seed is None else (self.seed + choice * _SEED_STEP) & _MASK


def read_counts(n: int | None, best_of: int | None, stream: bool | None, most: int) -> Counts:
    """How many choices.

    Args:
        most: sequences that may wait at once.

    Raises:
        ApiError: 400, naming the field.
    """
    answered = 1 if n is None else n
    made = answered if best_of is None else best_of
    if made < answered:
        raise bad_value("best_of", f"'best_of' must be at least 'n', which is {answered}")
    if made > answered and stream:
        raise bad_value("best_of", "'best_of' above 'n' cannot be streamed: the best choices are known at the end only")
    if made > most:
        raise bad_value("n" if best_of is None else "best_of", f"no more than {most} choices can be made at once here")
    return Counts(made, answered)


def read_choices(request: CommonRequest, count: int, bias: Bias, vocab_size: int, asked: Asked, salt: int) -> Choices:
    """Checks what is left beside the ranges in `fields`, and lengths, which come later.

    Args:
        count: choices of each prompt.
        salt: of the prefix cache.

    Raises:
        ApiError: 400, naming the field.
    """
    common = Sampling(
        max_tokens=0,
        temperature=_temperature(request.temperature),
        top_p=_top_p(request.top_p),
        top_k=_top_k(request.top_k, vocab_size),
        stop_tokens=_stop_tokens(request.stop_token_ids or [], vocab_size),
        ignore_eos=bool(request.ignore_eos),
        min_p=request.min_p or 0.0,
        repetition_penalty=_repetition_penalty(request.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        min_tokens=request.min_tokens or 0,
        allow_only=bias.allow_only,
        logprobs=asked.of_device,
        priority=request.priority or 0,
        cache_salt=salt,
    )
    return Choices(count, _seed(request.seed), bias, common, asked.scores_prompt)


def read_text_rules(request: CommonRequest) -> TextRules:
    """What becomes text and what ends it.

    Raises:
        ApiError: 400: an empty stop string, or too long ones.
    """
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if not all(stops):
        raise bad_value("stop", "'stop' must not contain an empty string")
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise bad_value("stop", f"'stop' may have at most {MAX_STOP_CHARACTERS} characters in all")
    return TextRules(
        stops=stops,
        min_tokens=request.min_tokens or 0,
        keep_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
    )


def fit_window(
    prompt_tokens: int, wanted: int | None, window: int, param: str, prompt_param: str, least: int = 1
) -> int:
    """Tokens to generate at most: `wanted`, or what the window leaves.

    Raises:
        ApiError: 400: `wanted` is below `least`, or prompt and answer do not fit.
    """
    if wanted is not None and wanted < least:
        raise bad_value(param, f"'{param}' must be at least {least}")
    if prompt_tokens >= window:
        raise context_length(
            f"the prompt is too long: it has {prompt_tokens} tokens, and this model's maximum context length is "
            f"{window} tokens, prompt and answer together",
            prompt_param,
        )
    if wanted is not None and prompt_tokens + wanted > window:
        raise context_length(
            f"{prompt_tokens} prompt tokens and {wanted} tokens to generate are too many: this model's maximum context "
            f"length is {window} tokens; '{param}' may be at most {window - prompt_tokens} here",
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
    if not all(0 <= token < vocab_size for token in unique):
        raise bad_value("stop_token_ids", f"'stop_token_ids' must be at least 0 and below {vocab_size}")
    return unique
