"""Restarts workers one by one, so that a fleet moves to a new release while it serves.

Each worker drains and exits; its supervisor starts it again. The next worker follows when this one is back. Nothing is
recorded: if the controller dies, the restart stops after the current worker.
"""

import asyncio
import time
from typing import Final

from msgspec.structs import replace

from ...schemas.acks import AckStatus
from ...schemas.control import Restart, State
from ...schemas.errors import InvalidRequest, NoWorkers
from ...schemas.presence import WorkerPresence, WorkerState
from ..protocol.fleet.command_result import CommandIncomplete, CommandResult
from ..protocol.fleet.loans import lone_reason
from .controller import Controller, OnAck

LOOK_EVERY_S: Final = 0.1
"""Seconds between two looks at the presence that the client has anyway. Workers publish presence every second."""


def is_back(before: WorkerPresence, now: WorkerPresence | None) -> bool:
    """Return True if a later incarnation of the worker serves, or is in the same state as before its restart."""
    return (
        now is not None and now.incarnation != before.incarnation and now.state in (WorkerState.SERVING, before.state)
    )


async def restart_one_by_one(
    controller: Controller, command: State, *, allow_none: bool, start_timeout_s: float, on_ack: OnAck | None
) -> CommandResult:
    """Restart the workers that `command` selects, in the order of their models and ids.

    Stop at the first worker that does not come back. The workers that remain are `missing` in the result.

    Args:
        command: its `model`, `workers`, `by` and `timeout_s` apply to each restart.
        allow_none: also restart a worker while no other worker can serve its requests.
        start_timeout_s: seconds for each worker to exit, start and come back.

    Raises:
        CommandIncomplete: not all workers are back.
        InvalidRequest: the first worker is the only one that serves its model, and `allow_none` is not set.
        NoWorkers, InvalidRequest, ControlError, BusBroken: as for other commands.
    """
    started = time.monotonic()
    await controller.roster(command, is_fresh=True)
    chosen = [
        worker
        for worker in await controller.known_workers()
        if command.model in (None, worker.model) and (command.workers is None or worker.worker in command.workers)
    ]
    result = CommandResult(command="restart", id=command.id)
    left = {each.worker: "not restarted" for each in sorted(chosen, key=lambda it: (it.model, it.worker))}
    for name in list(left):
        known = {worker.worker: worker for worker in await controller.known_workers()}
        why = None if name in known else "the worker is gone"
        if name in known and not allow_none and (why := lone_reason(known[name], known.values())) is not None:
            if not result.applied:
                problem = f"is not set, and {why}: requests would wait during the restart of {name}"
                raise InvalidRequest("allow_none", problem, "set, or another worker that serves")
            why = f"not restarted: {why}"
        if why is None:
            found = await _restart(controller, known[name], command, start_timeout_s, on_ack)
            why = found.missing.pop(name, None)
            result = replace(result, **{part: {**getattr(result, part), **getattr(found, part)} for part in _PARTS})
        if why is not None:
            left[name] = why
            break
        del left[name]
        if name not in result.applied:
            break
    result = replace(result, missing=left, seconds=time.monotonic() - started)
    if not result.is_complete:
        raise CommandIncomplete(result, "the command stopped there; repeat it when the cause is removed")
    return result


_PARTS: Final = ("applied", "failed", "unsupported", "stale", "late")


async def _restart(
    controller: Controller, before: WorkerPresence, asked: State, start_timeout_s: float, on_ack: OnAck | None
) -> CommandResult:
    """Restart one worker. In the result, it is `late` if it has exited and is not back in time."""
    name = before.worker
    command = Restart(
        incarnation=before.incarnation, model=before.model, workers=(name,), timeout_s=asked.timeout_s, by=asked.by
    )
    deadline = time.monotonic() + start_timeout_s
    try:
        result = await controller.send(command, on_ack)
    except CommandIncomplete as exc:
        return exc.ledger
    except (NoWorkers, InvalidRequest) as exc:
        return CommandResult(command=command.command, id=command.id, missing={name: str(exc)})
    # This incarnation never serves again after its ack, so any later one belongs to a new process.
    while True:
        now = {worker.worker: worker for worker in await controller.known_workers()}.get(name)
        if is_back(before, now):
            return result
        if time.monotonic() >= deadline:
            ack = result.applied[name]
            state = "absent" if now is None or now.incarnation == ack.incarnation else str(now.state)
            ack = replace(ack, status=AckStatus.PROGRESS, stage=f"not back after {start_timeout_s:g} s: {state}")
            return replace(result, applied={}, late={name: ack})
        await asyncio.sleep(LOOK_EVERY_S)
