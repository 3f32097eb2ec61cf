"""What orchestrators ask before they command: does the fleet live, is it paused, which weights has it."""

from collections import Counter
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....bus.protocol.fleet.desired import target_version, version_label
from ....schemas.errors import ErrorCode
from ....schemas.presence import WorkerPresence, WorkerState
from ..errors import HttpError, invalid
from ..service import Service
from ..status import json_response
from .reading import read_query

__all__ = [
    "DEAD",
    "FleetQuery",
    "fleet_state",
    "is_paused",
    "is_sleeping",
    "liveness",
    "rl_health",
    "weight_info",
    "weight_version",
]

PAUSED: Final = frozenset({WorkerState.PAUSED, WorkerState.DRAINED, WorkerState.ASLEEP})
"""A command has said that they take no requests."""
TAKING: Final = frozenset({WorkerState.SERVING, WorkerState.UPDATING})
"""They take requests, or do not stand still yet."""
DEAD: Final = frozenset({WorkerState.FENCED, WorkerState.FAILED, WorkerState.STOPPED})


class FleetQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which workers are asked about."""

    model: str | None = None
    """Whose; None: those of every model."""


async def _state(service: Service, request: Request) -> bus.FleetState:
    """The fleet, asked now; only the workers of `?model=`, if that is given.

    Raises:
        HttpError: 400, there is no such parameter; and as `fleet_state`.
    """
    return await fleet_state(service, read_query(request, FleetQuery).model)


async def fleet_state(service: Service, model: str | None) -> bus.FleetState:
    """The fleet, asked now; only the workers of a model, if that is given.

    Raises:
        HttpError: 400, there is no such model; 503, no workers are there.
    """
    state = await service.rb.fleet.state()
    if not state.workers:
        raise HttpError(503, "no workers are there", code=ErrorCode.NO_WORKERS)
    if model is None:
        return state
    workers = tuple(worker for worker in state.workers if worker.model == model)
    if not workers:
        models = sorted({worker.model for worker in state.workers})
        raise invalid("model", f"is {model[:64]!r}", f"one of {', '.join(models)}")
    return bus.FleetState(fleet=state.fleet, workers=workers, desired=state.desired)


async def rl_health(service: Service, request: Request) -> Response:
    """200 if some worker serves, or will go on by itself or on command; 503 if none can."""
    state = await _state(service, request)
    counts = Counter(worker.state for worker in state.workers)
    is_well = any(worker.state.is_present or worker.state in PAUSED for worker in state.workers)
    errors = {worker.worker: worker.last_error for worker in state.workers if worker.last_error is not None}
    answer = {"status": "ok" if is_well else "unhealthy", "workers": counts, "errors": errors}
    return json_response(answer, 200 if is_well else 503)


async def liveness(service: Service, request: Request) -> Response:
    """prime-rl's: 200 if some worker's process answers, 503 if none does."""
    state = await _state(service, request)
    is_alive = any(worker.state not in DEAD for worker in state.workers)
    return json_response({"status": "ok" if is_alive else "dead"}, 200 if is_alive else 503)


async def is_paused(service: Service, request: Request) -> Response:
    """vLLM's: true if no worker takes requests, because a command has said so."""
    state = await _state(service, request)
    states = {worker.state for worker in state.workers}
    return json_response({"is_paused": bool(states & PAUSED) and not states & TAKING})


async def is_sleeping(service: Service, request: Request) -> Response:
    """vLLM's: true if the engines of all workers have given up their memory."""
    state = await _state(service, request)
    return json_response({"is_sleeping": all(worker.state is WorkerState.ASLEEP for worker in state.workers)})


async def weight_version(service: Service, request: Request) -> Response:
    """The version of the weights of each worker, and the oldest and newest of those that may serve."""
    state = await _state(service, request)
    versions = {worker.worker: worker.weight_version for worker in state.workers}
    desired = {worker.worker: _target(state, worker) for worker in state.workers}
    able = [worker.weight_version for worker in _able(state)]
    return json_response(
        {
            "weight_version": min(able),
            "newest_weight_version": max(able),
            "is_uniform": len(set(able)) == 1,
            "workers": versions,
            "desired": desired,
        }
    )


def _target(state: bus.FleetState, worker: WorkerPresence) -> int | None:
    recorded = target_version(state.desired.get(worker.model), worker.worker)
    return worker.target_version if recorded is None else recorded


def _able(state: bus.FleetState) -> list[WorkerPresence]:
    """Workers that may serve; all, where none may."""
    return [worker for worker in state.workers if worker.state in PAUSED | TAKING] or list(state.workers)


async def weight_info(service: Service, request: Request) -> Response:
    """vLLM's: the version as it was given, and its number; the oldest of those that may serve."""
    state = await _state(service, request)
    worker = min(_able(state), key=lambda worker: worker.weight_version)
    number = worker.weight_version
    text = version_label(state.desired.get(worker.model), worker.worker, number)
    return json_response({"weight_version": text or str(number), "version": number})
