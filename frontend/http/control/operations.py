"""Pauses that run after the answer 202: clients read the state of a pause later under the id of the command.

No service stores these operations. The desired state in NATS has the pause and its workers, and the presence of each
worker has its progress. Any service of the fleet can therefore answer, also a service that started later. An id is
valid while it is among the last recorded commands of its model. A later pause, resume or drain supersedes the pause.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....bus.protocol.fleet.desired import effective
from ....bus.protocol.fleet.roster import workers_that_must_ack
from ....schemas.acks import Ack
from ....schemas.control import Pause
from ....schemas.desired import DesiredState
from ....schemas.errors import InvalidRequest, RollbusError
from ....schemas.presence import WorkerPresence, WorkerState
from ..errors import HttpError, http_error
from ..service import Service
from ..status import json_response
from .answers import NAMES, ledger_response

__all__ = ["begin_pause", "operation", "operation_as_json", "wants_async"]

SILENT: Final = frozenset({WorkerState.STARTING, WorkerState.FENCED, WorkerState.STOPPED, WorkerState.FAILED})
"""States of workers that serve nothing. These workers reconcile themselves with the desired state before they serve."""
READ_S: Final = 0.5
"""Seconds to wait for a worker's ack before the service reads the desired state."""


def wants_async(request: Request) -> bool:
    """Return True if the client prefers an immediate answer to an answer after the command has finished."""
    preferences = ",".join(request.headers.getlist("prefer")).lower().split(",")
    return any(one.split(";")[0].strip() == "respond-async" for one in preferences)


async def begin_pause(service: Service, command: Pause) -> Response:
    """Answer 202 as soon as the pause is recorded. From then on, workers execute it even if this service ends.

    Raises:
        HttpError, RollbusError: the errors of a pause without `async`, if the pause was not recorded.
    """
    changed = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(_send(service, command, changed))
        while not await _is_set(changed, READ_S) and not await _is_recorded(service, command):
            pass
        # The pause stays recorded. This service does not wait for the remaining acks.
        sending.cancel()
    error = None if sending.cancelled() else sending.result()
    if isinstance(error, bus.CommandIncomplete):
        return ledger_response(error, command.command)
    if isinstance(error, InvalidRequest):
        raise http_error(error, NAMES)
    if error is not None:
        raise error
    url = f"/v1/rl/operations/{command.id}"
    body = {
        "id": command.id,
        "operation": command.command,
        "status": "running" if sending.cancelled() else "succeeded",
        "url": url,
    }
    answer = json_response(body, 202)
    answer.headers.update({"Location": url, "Preference-Applied": "respond-async"})
    return answer


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def _send(service: Service, command: Pause, changed: asyncio.Event) -> RollbusError | None:
    """Send the command to the fleet. Set `changed` at the first ack of a worker, or when the command has ended."""
    loop = asyncio.get_running_loop()

    def on_ack(_ack: Ack) -> None:
        # Workers send acks only for recorded commands.
        loop.call_soon_threadsafe(changed.set)

    try:
        await service.rb.fleet.send(command, on_ack=on_ack)
    except RollbusError as error:
        return error
    finally:
        changed.set()
    return None


async def _is_recorded(service: Service, command: Pause) -> bool:
    state = await service.rb.fleet.state()
    try:
        models = workers_that_must_ack(state.workers, command)
    except RollbusError:
        # The command itself fails with the same error, unless a worker appears in time.
        return False
    return all(_epoch_of(state.desired.get(model), command.id) is not None for model in models)


def _epoch_of(desired: DesiredState | None, command_id: str) -> int | None:
    """Return the epoch that recorded a command; None: not recorded, or no longer among the last recorded commands."""
    seen = () if desired is None else desired.seen
    return next((each.epoch for each in seen if each.id == command_id), None)


async def operation(service: Service, request: Request) -> Response:
    """Return the progress of a pause, according to the desired state and the presence of the workers."""
    name = request.path_params["id"]
    found = operation_as_json(await service.rb.fleet.state(), name)
    if found is None:
        raise HttpError(
            404,
            f"operation {name[:64]!r} is unknown, or older than the last recorded commands",
            code="unknown_operation",
            param="id",
        )
    return json_response(found)


def operation_as_json(state: bus.FleetState, command_id: str) -> dict[str, Any] | None:
    """Return the state of a pause as JSON; None: the id is unknown or belongs to another command."""
    epochs = {
        model: epoch
        for model, desired in state.desired.items()
        if (epoch := _epoch_of(desired, command_id)) is not None
    }
    if not epochs:
        return None
    lines: list[dict[str, Any]] = []
    modes: set[str] = set()
    for model, epoch in epochs.items():
        desired = state.desired[model]
        own = [worker for worker in state.workers if worker.model == model and worker.state not in SILENT]
        commands = _standing(desired, command_id)
        if any(not isinstance(command, Pause) for command in commands):
            return None
        modes.update(command.mode for command in commands if isinstance(command, Pause))
        lines += _lines(desired, command_id, own, epoch)
    return {
        "id": command_id,
        "operation": "pause",
        "status": _status(line["result"] for line in lines),
        "mode": modes.pop() if modes else None,
        "inflight_requests": sum(line["in_flight"] for line in lines),
        "epochs": epochs,
        "workers": lines,
    }


def _standing(desired: DesiredState, command_id: str) -> list[object]:
    """Return the command once for each register that still contains it."""
    return [
        recorded.command
        for registers in (desired.registers, *desired.workers.values())
        for recorded in registers.values()
        if recorded.command.id == command_id
    ]


def _lines(
    desired: DesiredState, command_id: str, workers: list[WorkerPresence], epoch: int
) -> Iterator[dict[str, Any]]:
    """Yield the progress of each worker to which the pause applies.

    If later commands have replaced the pause everywhere, yield all workers of the model as `stale`, because the desired
    state no longer has the workers of the pause.
    """
    standing = {
        worker.worker: recorded.command
        for worker in workers
        if (recorded := effective(desired, worker.worker).get("pause")) is not None
        and recorded.command.id == command_id
    }
    for worker in workers:
        command = standing.get(worker.worker)
        if command is None and standing:
            continue
        yield {
            "worker": worker.worker,
            "result": _result(worker, command.mode, epoch) if isinstance(command, Pause) else "stale",
            "state": worker.state,
            "in_flight": worker.in_flight,
        }


def _result(worker: WorkerPresence, mode: str, epoch: int) -> str:
    if worker.epoch < epoch:
        return "running"
    # The time expired with requests in flight. The worker accepts no more requests and still finishes these.
    return "failed" if worker.in_flight and mode != "keep" else "applied"


def _status(results: Iterable[str]) -> str:
    """Return the status of the whole pause: `running` if any worker is, else `superseded`, else `failed`."""
    counts = Counter(results)
    for result, status in (("running", "running"), ("stale", "superseded"), ("failed", "failed")):
        if counts[result]:
            return status
    return "succeeded" if counts["applied"] else "running"
