"""What one worker knows of one tenant: whether a request may begin, and what it has used."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from dpu_service.tenants.bucket import Bucket
from dpu_service.tenants.page import CounterPage, Word
from dpu_service.tenants.tenant import Tenant

MOST_FORESEEN = 1024
"""Tokens of an answer that are charged at its beginning at most: `max_tokens` is often the whole window."""
BUSY_SECONDS = 1.0
_RATES = (("requests", Word.REQUESTS), ("tokens", Word.TOKENS))
_LEFT = {Word.REQUESTS: Word.REQUESTS_LEFT, Word.TOKENS: Word.TOKENS_LEFT}


class OverLimitError(Exception):
    """A request has to wait.

    Args:
        what: `requests` or `tokens`.
        message: for people.
        seconds: until it may be tried again.
    """

    def __init__(self, what: str, message: str, seconds: float) -> None:
        super().__init__(message)
        self.what = what
        self.seconds = seconds


class TooLargeForLimitError(Exception):
    """A request that would never be let in."""


@dataclass(frozen=True)
class Rate:
    """What is left of a limit by the minute."""

    what: str
    limit: int
    left: int
    reset: float
    """Seconds until nothing of it is used."""


class Ticket:
    """A request that was let in. Always `close` it."""

    def __init__(self, account: Account, sequences: int, foreseen: int) -> None:
        self._account = account
        self._sequences = sequences
        self._waiting = sequences
        self._foreseen = foreseen
        account.add(Word.RUNNING, sequences)
        account.add(Word.WAITING, sequences)
        account.add(Word.REQUESTS, 1)
        account.add(Word.TOKENS, foreseen)
        account.tick()

    def started(self) -> None:
        """One of its sequences has its first token, or has ended without."""
        if self._waiting:
            self._waiting -= 1
            self._account.add(Word.WAITING, -1)

    def close(self, tokens: int | None) -> None:
        """The request has used so many tokens; None: it was not served at all, and counts for nothing."""
        account = self._account
        account.add(Word.RUNNING, -self._sequences)
        account.add(Word.WAITING, -self._waiting)
        account.add(Word.TOKENS, (tokens or 0) - self._foreseen)
        if tokens is None:
            account.add(Word.REQUESTS, -1)
        account.tick()
        self._sequences = self._waiting = 0


class Account:
    """A tenant at one worker.

    Args:
        page: counters of all workers.
        worker: row of this one.
    """

    def __init__(self, tenant: Tenant, page: CounterPage, worker: int) -> None:
        self.tenant = tenant
        self._page = page
        self._worker = worker
        self._buckets: dict[Word, Bucket] = {}
        self.update(tenant)

    def update(self, tenant: Tenant) -> None:
        """Other limits from now on."""
        self.tenant = tenant
        for what, word in _RATES:
            size: int | None = getattr(tenant.limits, f"{what}_per_minute")
            if size is None:
                self._buckets.pop(word, None)
            elif word in self._buckets:
                self._buckets[word].resize(size)
            else:
                left = self._page.least(tenant.slot, _LEFT[word], otherwise=size)
                self._buckets[word] = Bucket(size, left, self._total(word), time.monotonic())

    def tick(self) -> None:
        """Once a second, and when something was charged: for workers that start later."""
        for word in self._buckets:
            self._left(word)

    def add(self, word: Word, count: int) -> None:
        """Counts for this worker."""
        if count:
            self._page.add(self._worker, self.tenant.slot, word, count)

    def check(self, sequences: int = 1, tokens: int = 1) -> None:
        """Whether a request may begin that wants so much.

        Raises:
            OverLimitError: not now.
            TooLargeForLimitError: never.
        """
        limits = self.tenant.limits
        self._check_count(Word.RUNNING, limits.concurrent_sequences, sequences, "sequences at once")
        self._check_count(Word.WAITING, limits.queued_sequences, sequences, "sequences waiting for their first token")
        self._check_rate("requests", Word.REQUESTS, 1)
        self._check_rate("tokens", Word.TOKENS, tokens)

    def enter(self, sequences: int, prompt_tokens: int, most_tokens: int) -> Ticket:
        """Lets a request begin.

        Args:
            most_tokens: `max_tokens` of all its sequences.

        Raises:
            OverLimitError: not now.
            TooLargeForLimitError: never.
        """
        foreseen = prompt_tokens + min(most_tokens, MOST_FORESEEN * sequences)
        self.check(sequences, foreseen)
        return Ticket(self, sequences, foreseen)

    def rates(self) -> list[Rate]:
        """For each limit by the minute."""
        found = []
        for what, word in _RATES:
            bucket = self._buckets.get(word)
            if bucket is not None:
                left = max(0, math.floor(self._left(word)))
                found.append(Rate(what, bucket.size, left, bucket.seconds_until(bucket.size)))
        return found

    def _check_count(self, word: Word, limit: int | None, wanted: int, what: str) -> None:
        if limit is None:
            return
        if wanted > limit:
            raise TooLargeForLimitError(f"the request asks for {wanted} sequences; the limit is {limit} {what}")
        if self._total(word) + wanted > limit:
            raise OverLimitError("requests", f"the limit is {limit} {what}", BUSY_SECONDS)

    def _check_rate(self, what: str, word: Word, wanted: float) -> None:
        bucket = self._buckets.get(word)
        if bucket is not None and self._left(word) < min(wanted, bucket.size):
            seconds = bucket.seconds_until(wanted)
            raise OverLimitError(what, f"the limit is {bucket.size} {what} a minute", seconds)

    def _left(self, word: Word) -> float:
        left = self._buckets[word].look(self._total(word), time.monotonic())
        self._page.leave_word(self._worker, self.tenant.slot, _LEFT[word], math.floor(left))
        return left

    def _total(self, word: Word) -> int:
        return self._page.total(self.tenant.slot, word)
