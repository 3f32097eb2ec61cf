"""Pauses that a client does not wait for: begun with 202, asked for later under the command's id.

No service remembers them. What is recorded in NATS says which pause was wanted of whom, and each worker says how far it
is; so any service of the fleet can answer, also one that was started since. An id is known as long as it is among the
last commands of its model; a later pause or resume supersedes it.
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
from ....schemas.control import Ack, Pause
from ....schemas.desired import DesiredState
from ....schemas.errors import InvalidRequest, RollbusError
from ....schemas.presence import WorkerPresence, WorkerState
from ..errors import HttpError, http_error
from ..service import Service
from ..status import json_response
from .answers import NAMES, ledger_response

__all__ = ["begin_pause", "operation", "operation_as_json", "wants_async"]

SILENT: Final = frozenset({WorkerState.STARTING, WorkerState.FENCED, WorkerState.STOPPED, WorkerState.FAILED})
"""Workers that serve nothing, and bring themselves to what is recorded before they do."""
READ_S: Final = 0.5
"""Seconds to wait for a worker's ack before the recorded state is read."""


def wants_async(request: Request) -> bool:
    """The client prefers an answer now to one when all is done."""
    preferences = ",".join(request.headers.getlist("prefer")).lower().split(",")
    return any(one.split(";")[0].strip() == "respond-async" for one in preferences)


async def begin_pause(service: Service, command: Pause) -> Response:
    """Answer 202 once the pause is recorded: from then on the workers see to it, whatever becomes of this service.

    Raises:
        HttpError, RollbusError: as for a pause that is waited for, where nothing is recorded.
    """
    changed = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(_send(service, command, changed))
        while not await _is_set(changed, READ_S) and not await _is_recorded(service, command):
            pass
        # What is recorded stays; nobody waits for the answers here.
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
    """Give the command to the fleet; `changed` is set once a worker has spoken of it, or all is over."""
    loop = asyncio.get_running_loop()

    def on_ack(_ack: Ack) -> None:
        # Workers speak only of what is recorded.
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
        # The command itself fails with it, unless somebody comes.
        return False
    return all(_epoch_of(state.desired.get(model), command.id) is not None for model in models)


def _epoch_of(desired: DesiredState | None, command_id: str) -> int | None:
    """In which epoch a command was recorded; None: it was not, or that is long ago."""
    seen = () if desired is None else desired.seen
    return next((each.epoch for each in seen if each.id == command_id), None)


async def operation(service: Service, request: Request) -> Response:
    """Tell how far a pause is, from what is recorded and from what workers say of themselves."""
    name = request.path_params["id"]
    found = operation_as_json(await service.rb.fleet.state(), name)
    if found is None:
        raise HttpError(404, f"operation {name[:64]!r} is unknown, or long ago", code="unknown_operation", param="id")
    return json_response(found)


def operation_as_json(state: bus.FleetState, command_id: str) -> dict[str, Any] | None:
    """What is known of a pause; None: nothing."""
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
    """The command, as often as it still counts for somebody."""
    return [
        recorded.command
        for registers in (desired.registers, *desired.workers.values())
        for recorded in registers.values()
        if recorded.command.id == command_id
    ]


def _lines(
    desired: DesiredState, command_id: str, workers: list[WorkerPresence], epoch: int
) -> Iterator[dict[str, Any]]:
    """How far each worker is that the pause concerns; all of the model, where nobody can say any more which."""
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
    # Its time was up with requests in flight; it takes no more, and these are still being finished.
    return "failed" if worker.in_flight and mode != "keep" else "applied"


def _status(results: Iterable[str]) -> str:
    """Of all: what is not over comes first, then what went wrong."""
    counts = Counter(results)
    for result, status in (("running", "running"), ("stale", "superseded"), ("failed", "failed")):
        if counts[result]:
            return status
    return "succeeded" if counts["applied"] else "running"
