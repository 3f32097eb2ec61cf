"""Routes that orchestrators read before they send commands: health, pause, sleep and weights of the fleet."""

from collections import Counter
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....bus.protocol.fleet.desired import served_version, version_label
from ....bus.protocol.fleet.pinning import unpinned
from ....bus.protocol.fleet.standing import open_transfers, recorded_stops
from ....schemas.errors import ErrorCode
from ....schemas.presence import WorkerPresence, WorkerState
from ..errors import HttpError, invalid
from ..service import Service
from ..status import json_response
from .reading import read_query

__all__ = [
    "DEAD",
    "SETTLE_S",
    "FleetQuery",
    "fleet_state",
    "is_paused",
    "is_sleeping",
    "liveness",
    "rl_health",
    "stale_field",
    "weight_info",
    "weight_version",
]

PAUSED: Final = frozenset({WorkerState.PAUSED, WorkerState.DRAINED, WorkerState.ASLEEP})
"""States of workers that accept no requests because of a command."""
TAKING: Final = frozenset({WorkerState.SERVING, WorkerState.UPDATING})
"""States of workers that accept requests, or that have not finished a pause or an update."""
DEAD: Final = frozenset({WorkerState.FENCED, WorkerState.FAILED, WorkerState.STOPPED})
"""States of workers that `/liveness` counts as dead."""


class FleetQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that the answer covers."""

    model: str | None = None
    """Model of the workers; None: workers of every model."""


SETTLE_S: Final = 1.0
"""Seconds to wait for presence as new as the recorded state. It usually arrives within milliseconds of the acks."""


async def _state(service: Service, request: Request, settle_s: float = SETTLE_S) -> bus.FleetState:
    """Return the current state of the fleet; if the query has `model`, only the workers of that model.

    Raises:
        HttpError: 400 if a query parameter is unknown. Also the errors of `fleet_state`.
    """
    return await fleet_state(service, read_query(request, FleetQuery).model, settle_s)


def stale_field(state: bus.FleetState) -> dict[str, bool]:
    """Return the field `stale` of an answer if it may be older than the recorded state, else no field."""
    return {"stale": True} if state.stale else {}


async def fleet_state(service: Service, model: str | None, settle_s: float = 0.0) -> bus.FleetState:
    """Return the current state of the fleet; if `model` is not None, only the workers of that model.

    Args:
        settle_s: as in `rollbus.Fleet.state`.

    Raises:
        HttpError: 400 if the fleet has no worker of that model, 503 if the fleet has no workers.
    """
    state = await service.rb.fleet.state(settle_s=settle_s)
    if not state.workers:
        raise HttpError(503, "the fleet has no workers", code=ErrorCode.NO_WORKERS)
    if model is None:
        return state
    workers = tuple(worker for worker in state.workers if worker.model == model)
    if not workers:
        models = sorted({worker.model for worker in state.workers})
        raise invalid("model", f"is {model[:64]!r}", f"one of {', '.join(models)}")
    return bus.FleetState(fleet=state.fleet, workers=workers, desired=state.desired)


async def rl_health(service: Service, request: Request) -> Response:
    """Answer 200 if a worker serves, will serve by itself, or will serve after a command; else 503.

    The answer names who stopped workers, and who has an open transfer of weights.
    """
    # Probes have short timeouts, so this does not wait.
    state = await _state(service, request, 0.0)
    counts = Counter(worker.state for worker in state.workers)
    is_well = any(worker.state.is_present or worker.state in PAUSED for worker in state.workers)
    errors = {worker.worker: worker.last_error for worker in state.workers if worker.last_error is not None}
    not_pinned = [line for desired in state.desired.values() for line in unpinned(desired)]
    transfers = [
        {**msgspec.structs.asdict(transfer), "workers": workers}
        for transfer, workers in open_transfers(state.workers).values()
    ]
    models = {worker.model for worker in state.workers}
    stops = recorded_stops({model: desired for model, desired in state.desired.items() if model in models})
    answer = {
        "status": "ok" if is_well else "unhealthy",
        "workers": counts,
        "errors": errors,
        "unpinned": not_pinned,
        "stops": stops,
        "transfers": transfers,
        **stale_field(state),
    }
    return json_response(answer, 200 if is_well else 503)


async def liveness(service: Service, request: Request) -> Response:
    """Answer 200 if the process of any worker is live, else 503, as prime-rl's route does."""
    state = await _state(service, request, 0.0)
    is_alive = any(worker.state not in DEAD for worker in state.workers)
    return json_response({"status": "ok" if is_alive else "dead"}, 200 if is_alive else 503)


async def is_paused(service: Service, request: Request) -> Response:
    """Return true if no worker accepts requests and a command is the reason, as vLLM's route does."""
    state = await _state(service, request)
    states = {worker.state for worker in state.workers}
    return json_response({"is_paused": bool(states & PAUSED) and not states & TAKING, **stale_field(state)})


async def is_sleeping(service: Service, request: Request) -> Response:
    """Return true if the engines of all workers have freed their memory, as vLLM's route does."""
    state = await _state(service, request)
    is_asleep = all(worker.state is WorkerState.ASLEEP for worker in state.workers)
    return json_response({"is_sleeping": is_asleep, **stale_field(state)})


async def weight_version(service: Service, request: Request) -> Response:
    """Return each worker's weight version, and the oldest and newest version of the workers that may serve.

    Of an adapter that answers under the model's name, this is the adapter's version.
    """
    state = await _state(service, request)
    versions = {worker.worker: worker.served_version for worker in state.workers}
    desired = {worker.worker: _target(state, worker) for worker in state.workers}
    able = [worker.served_version for worker in _able(state)]
    return json_response(
        {
            "weight_version": min(able),
            "newest_weight_version": max(able),
            "is_uniform": len(set(able)) == 1,
            "workers": versions,
            "desired": desired,
            **stale_field(state),
        }
    )


def _target(state: bus.FleetState, worker: WorkerPresence) -> int | None:
    recorded = served_version(state.desired.get(worker.model), worker.worker)
    return worker.target_version if recorded is None else recorded


def _able(state: bus.FleetState) -> list[WorkerPresence]:
    """Return the workers that may serve; if no worker may serve, return all workers."""
    return [worker for worker in state.workers if worker.state in PAUSED | TAKING] or list(state.workers)


async def weight_info(service: Service, request: Request) -> Response:
    """Return the oldest weight version of the workers that may serve: its text as vLLM does, and its number."""
    state = await _state(service, request)
    worker = min(_able(state), key=lambda worker: worker.served_version)
    number = worker.served_version
    text = None
    if worker.base_adapter_version is None:
        text = version_label(state.desired.get(worker.model), worker.worker, number)
    return json_response({"weight_version": text or str(number), "version": number, **stale_field(state)})
