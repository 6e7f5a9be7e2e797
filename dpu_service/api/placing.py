"""Which runtime a request goes to."""

from __future__ import annotations

from dpu_service import metrics
from dpu_service.api.errors import from_sequences, model_not_found, unavailable
from dpu_service.api.exchange import Exchange
from dpu_service.api.generation import Generation, Plan
from dpu_service.routing.prefixes import request_hashes
from dpu_service.runtimes import Serving
from dpu_service.sequences.errors import DeviceUnavailableError, QueueFullError, SequencesError
from dpu_service.sequences.inbox import Inbox
from dpu_service.sequences.pump import Pump
from dpu_service.service import Service

QUEUE_FULL = "too many requests are waiting; try again later"


def check_ready(service: Service, exchange: Exchange) -> None:
    """Whether any request is taken.

    Raises:
        ApiError: 503.
    """
    if service.draining:
        exchange.close_after = True
    if not service.ready:
        raise unavailable(f"not ready: {service.why_not_ready()}", "shutting_down" if service.draining else "not_ready")


def check_room(servings: list[Serving]) -> None:
    """Whether any of these runtimes would take one more sequence.

    Raises:
        ApiError: 503.
    """
    if servings and all(one.pump.full for one in servings):
        raise from_sequences(QueueFullError(QUEUE_FULL))


def find(service: Service, model: str) -> Serving:
    """A ready runtime that serves a model: the one with the largest window, by which requests are checked.

    Raises:
        ApiError: 404 where nobody serves it, 503 where nobody does now or all are full.
    """
    ready = service.runtimes.ready_of(model)
    if not ready and service.runtimes.knows(model):
        raise unavailable("not ready: no GPU runtime that serves this model takes requests now", "not_ready")
    if not ready:
        raise model_not_found(model)
    check_room(ready)
    return ready[0]


def start(service: Service, exchange: Exchange, serving: Serving, plan: Plan, inbox: Inbox) -> Generation:
    """Starts a request on the runtime that suits it best, or the next one that takes it.

    Args:
        serving: by which the request was checked.

    Raises:
        SequencesError: none takes it.
    """
    runtimes, prompts = service.runtimes, _hashes(service, plan)
    failure = _none(service, serving)
    for room in runtimes.choices(serving, plan.wanted, prompts):
        try:
            generation = Generation(room.serving, plan, inbox, exchange.arrived)
        except (DeviceUnavailableError, QueueFullError) as error:
            failure = error
            continue
        runtimes.sent(room.serving, plan.choices, prompts)
        name = str(room.serving.runtime)
        exchange.notes["runtime"] = name
        metrics.RUNTIME_REQUESTS.labels(name, room.reason.value).inc()
        return generation
    raise failure


def pump_for(service: Service, exchange: Exchange, serving: Serving, plan: Plan) -> Pump:
    """Where something is to be asked before a request; the request itself, which begins alike, then goes there too.

    Raises:
        SequencesError: no runtime takes it.
    """
    prompts = _hashes(service, plan)
    for room in service.runtimes.choices(serving, plan.wanted, prompts):
        service.runtimes.sent(room.serving, 1, prompts)
        return room.serving.pump
    raise _none(service, serving)


def _none(service: Service, serving: Serving) -> SequencesError:
    """What a request gets that no runtime takes."""
    if service.runtimes.ready_of(serving.model.name):
        return QueueFullError(QUEUE_FULL)
    return DeviceUnavailableError("no device takes requests now")


def _hashes(service: Service, plan: Plan) -> list[list[int]]:
    if len(service.runtimes) == 1:
        return []
    salt = plan.wanted[0].samplings[0].cache_salt.to_bytes(8, "little")
    return request_hashes((one.prompt for one in plan.wanted), salt)
