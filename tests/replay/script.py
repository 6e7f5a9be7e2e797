"""What the front end asks of the scripted device, and what that then says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blink_proto.arena import ErrorCode, Finish, SubmitFlag


@dataclass(frozen=True)
class Submission:
    """What the front end asked for."""

    channel: int
    position: int
    prompt: tuple[int, ...]
    max_tokens: int
    top_k: int
    temperature: float
    top_p: float
    seed: int
    flags: int
    stop_tokens: tuple[int, ...]
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    logprobs: int
    priority: int
    cache_salt: int
    bias: tuple[tuple[int, float], ...]
    bans: tuple[tuple[int, ...], ...]


@dataclass
class Script:
    """What a sequence says.

    Its last token carries `finish`; with `end_apart` an END record of its own does. Without a `finish` it then says
    nothing more. `max_tokens` of the submission cuts it with LENGTH. Where the submission wants log-probabilities,
    those of the tokens are `logprobs` in turn: (token, logarithm), its own first; the last ones go on for ever.
    Without any, token t has -0.5 and rank 3, and the likely ones are t + 1, t + 2, … with -1, -1.5, …
    Where it wants those of its prompt too, they come first, all at once as far as the log has room: `prompt_logprobs`
    in turn, from the second token on, or by the same rule. With `max_tokens` 0 nothing else comes.
    `found`: blocks of the prompt that the prefix cache is said to have had.
    """

    tokens: list[int]
    finish: Finish = Finish.STOP
    every: float = 0.0
    delay: float = 0.0
    end_apart: bool = False
    error: ErrorCode = ErrorCode.NONE
    reject: bool = False
    found: int = 0
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


def logprobs_of(
    scripted: list[list[tuple[int, float]]], tokens: Sequence[int], place: int, count: int
) -> list[tuple[int, float]]:
    """So many of the token at this place."""
    if scripted:
        return scripted[min(place, len(scripted) - 1)][:count]
    return [(tokens[place] + k, -0.5 * (k + 1)) for k in range(count)]


@dataclass
class Playing:
    """A sequence under way."""

    submission: Submission
    script: Script
    due: float
    said: int = 0
    scored: int = 1
    """Tokens of the prompt that were spoken of; nothing is said of the first one."""

    @property
    def scores(self) -> bool:
        """Whether a token of the prompt comes next."""
        wanted = self.submission.flags & SubmitFlag.PROMPT_LOGPROBS
        return bool(wanted) and self.scored < len(self.submission.prompt)
