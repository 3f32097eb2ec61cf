"""What keeps workers from serving until somebody ends it: recorded stops, and open transfers of weights. No I/O."""

from collections.abc import Iterable, Mapping

import msgspec

from ....schemas.control import Drain, Pause, Sleep
from ....schemas.desired import DesiredState, Recorded
from ....schemas.presence import WorkerPresence
from ....schemas.weights import OpenTransfer

__all__ = ["RecordedStop", "open_transfers", "recorded_stops", "stop_of"]


class RecordedStop(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded pause, drain or sleep. It outlives its author and ends with a resume or a wake."""

    model: str
    """Model of the workers."""
    worker: str | None
    """The one worker that it stops; None: all workers of the model."""
    what: str
    """`paused (keep)`, `paused (wait)`, `paused (abort)`, `drained` or `asleep`."""
    by: str
    """Who recorded it; empty if the release of its author does not say."""
    since: float | None
    """Unix time of the recording; None if the release of its author does not say."""


def recorded_stops(states: Mapping[str, DesiredState]) -> list[RecordedStop]:
    """Return the stops of all models, first those for all workers of a model, then those for single workers."""
    found = []
    for model, state in sorted(states.items()):
        for worker, registers in [(None, state.registers), *sorted(state.workers.items())]:
            for register in ("pause", "sleep"):
                if register in registers and (what := stop_of(registers[register])) is not None:
                    recorded = registers[register]
                    since = recorded.at or None
                    found.append(RecordedStop(model=model, worker=worker, what=what, by=recorded.by, since=since))
    return found


def stop_of(recorded: Recorded) -> str | None:
    """Return in words how a recorded command stops workers; None: it does not."""
    match recorded.command:
        case Pause(mode=mode):
            return f"paused ({mode})"
        case Drain():
            return "drained"
        case Sleep():
            return "asleep"
    return None


def open_transfers(workers: Iterable[WorkerPresence]) -> dict[str, tuple[OpenTransfer, list[str]]]:
    """Return each open transfer by its id, as its first worker announces it, with all its workers."""
    found: dict[str, tuple[OpenTransfer, list[str]]] = {}
    for worker in workers:
        if worker.transfer is not None:
            found.setdefault(worker.transfer.id, (worker.transfer, []))[1].append(worker.worker)
    return found
