"""What is remembered of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request. Times are seconds on one monotonic clock; `due` is when it was scheduled to arrive.

    `error` is "" for a success, else the kind of failure (see `client`), with `detail` for a person to read.
    `output_tokens` comes from the server's usage where it sends one (`tokens_counted`), else it is the number of
    chunks that carried text.
    """

    due: float
    sent: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    end: float = 0.0
    status: int = 0
    finish_reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens_counted: bool = False
    error: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether a complete answer came."""
        return not self.error

    @property
    def latency(self) -> float:
        """Seconds from the scheduled arrival to the end of the answer."""
        return self.end - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds from the scheduled arrival to the first text; None where the answer was not streamed."""
        return self.chunk_times[0] - self.due if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each output token after the first; None below two tokens or without a stream."""
        if len(self.chunk_times) < 2 or self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk with text and the next."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]
