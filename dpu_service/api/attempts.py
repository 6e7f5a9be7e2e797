"""A request on a runtime, and on another one when the first is lost before anything of the answer is out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from dpu_service import metrics
from dpu_service.api.deadline import Deadline
from dpu_service.api.deciding import decide
from dpu_service.api.exchange import Exchange
from dpu_service.api.generation import Generation
from dpu_service.api.placing import pump_for, start
from dpu_service.api.prepare import Prepared
from dpu_service.runtimes import Serving
from dpu_service.sequences.errors import ClientGoneError, DeadlinePassedError, DeviceUnavailableError, SequencesError
from dpu_service.sequences.inbox import Inbox
from dpu_service.service import Service

log = logging.getLogger(__name__)

T = TypeVar("T")
Run = Callable[[Exchange, Generation, Prepared], Awaitable[T]]


class Attempts:
    """Runs one request.

    Args:
        serving: by which the request was checked.
        started: called for each sequence of an attempt when it has its first token, or has ended without.
    """

    def __init__(
        self, service: Service, exchange: Exchange, serving: Serving, deadline: Deadline, started: Callable[[], None]
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._serving = serving
        self._deadline = deadline
        self._started = started
        self._inboxes: list[Inbox] = []
        """Of the present attempt."""
        self._failure: SequencesError | None = None
        self._latest: Generation | None = None
        self.prompt_tokens = 0
        """Of the latest attempt, as far as it has come."""
        exchange.when_gone(lambda: self._end(ClientGoneError("the client went away")))
        deadline.watch(lambda: self._end(DeadlinePassedError("the client's deadline")))

    @property
    def begun(self) -> bool:
        """Whether a runtime has taken the request."""
        return self._latest is not None

    @property
    def completion_tokens(self) -> int:
        """Of the latest attempt."""
        return 0 if self._latest is None else self._latest.completion_tokens

    async def run(self, prepared: Prepared, run: Run[T]) -> T:
        """The result of `run`, by the first runtime or by one more: requests may be what runtimes are lost by, so no
        request is tried on a third one.

        Raises:
            SequencesError: no runtime takes it, or it was lost; nothing of an answer is out then.
        """
        try:
            return await self._once(prepared, run)
        except DeviceUnavailableError:
            if self._failure is not None or not self._service.runtimes.ready_of(self._serving.model.name):
                raise
        log.warning("a request is tried on another runtime", extra={"fields": {"request": self._exchange.request_id}})
        metrics.RUNTIME_RETRIES.inc()
        return await self._once(prepared, run)

    async def _once(self, prepared: Prepared, run: Run[T]) -> T:
        inbox, aside = Inbox(self._started), Inbox()
        self._inboxes = [inbox, aside]
        if len(prepared.plans) > 1:
            pump = pump_for(self._service, self._exchange, self._serving, prepared.plan)
            plan = await self._deadline.keep(decide(pump, prepared.plans, aside))
            prepared = replace(prepared, plans=[plan])
        self._latest = start(self._service, self._exchange, self._serving, prepared.plan, inbox)
        self.prompt_tokens = prepared.plan.prompt_tokens
        try:
            return await run(self._exchange, self._latest, prepared)
        finally:
            self._latest.close()

    def _end(self, failure: SequencesError) -> None:
        """Cancels at once, also where a client is slow to read and nobody looks at the inbox."""
        self._failure = self._failure or failure
        if self._latest is not None:
            self._latest.cancel()
        for inbox in self._inboxes:
            inbox.fail(failure)
