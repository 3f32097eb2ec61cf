"""The commands, starts and losses of the last day of a fleet. No I/O."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from ....schemas.control import (
    AnyCommand,
    DesiredState,
    Drain,
    FinishWeightUpdate,
    LoadLora,
    Pause,
    UnloadLora,
    UpdateWeights,
)
from ....schemas.presence import WorkerPresence

DAY_S: Final = 86_400.0
MAX_EVENTS: Final = 1024
"""Events of each of the two logs: a thousand workers that restart, or an update every 90 s for a day. As JSON they take
about 150 KB."""
MAX_KNOWN: Final = 16_384
"""Workers that are remembered. Beyond it, the one that is gone for the longest time is forgotten."""
GONE_AFTER: Final = 2
"""Updates without a worker until it counts as gone. After an outage of NATS, presence may come after the first."""
SAME_PROCESS_S: Final = 2.0
"""A new incarnation whose uptime continues the earlier one, within these seconds, belongs to the same process."""
MAX_DETAIL_CHARS: Final = 200
MAX_NAMED: Final = 50
"""Workers that an event of a command names; a command may name thousands."""


class DayEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of the last day."""

    at: float = msgspec.field()
    """Unix time: of commands, when NATS stored them."""
    what: str = msgspec.field()
    """A command's name, `undo` or `reset`; of a worker: `started`, `restarted`, `returned` or `gone`."""
    model: str = msgspec.field()
    worker: str | None = None
    """The worker; absent from commands."""
    workers: tuple[str, ...] = ()
    """The only workers that a command concerns, the first 50; absent: all workers of the model."""
    num_workers: int = 0
    """Their number; absent with `workers`."""
    id: str | None = None
    """Id of the command."""
    epoch: int | None = None
    """Epoch of the command."""
    by: str = ""
    """Author of the command, as its program says; absent if unknown."""
    detail: str = ""
    """The mode of a pause, the version of weights, the last error of a worker."""


class DayLog:
    """Events of the last day, at most `MAX_EVENTS`.

    Attributes:
        events: the events in the order of their times.
        since: Unix time from which the log is complete.
    """

    def __init__(self, since: float = 0.0) -> None:
        self.since = since
        self.events: list[DayEvent] = []

    def add(self, events: Iterable[DayEvent], now: float) -> None:
        """Add events and forget those of more than a day ago.

        If there are too many, forget the oldest of the workers or models that have most of them.
        """
        recent = [each for each in (*self.events, *events) if each.at > now - DAY_S]
        if len(recent) > MAX_EVENTS:
            # An owner's newest event comes first, then the second of each owner, and so on.
            recent.sort(key=lambda each: -each.at)
            places: Counter[tuple[str, str | None]] = Counter()
            ranked = []
            for event in recent:
                owner = event.model, event.worker
                ranked.append((places[owner], -event.at, event))
                places[owner] += 1
            ranked.sort(key=lambda each: each[:2])
            self.since = max(self.since, *(-each[1] for each in ranked[MAX_EVENTS:]))
            recent = [event for _, _, event in ranked[:MAX_EVENTS]]
        self.events = sorted(recent, key=lambda each: each.at)


def command_event(state: DesiredState, at: float) -> DayEvent | None:
    """Return the event of the command that made this state; None if it is the first state, without a command."""
    if state.is_first:
        return None
    everywhere = [(None, state.registers), *state.workers.items()]
    changed = [(name, each) for name, own in everywhere for each in own.values() if each.epoch == state.epoch]
    event = DayEvent(at=round(at, 3), what="undo", model=state.model, epoch=state.epoch)
    fresh = [each for each in changed if each[1].command.epoch == state.epoch]
    if not fresh:
        # An undo restores earlier commands under a new epoch, or leaves none. A reset leaves nothing at all.
        back = ", ".join(sorted({recorded.command.command for _, recorded in changed}))
        return replace(event, what="undo" if state.registers or state.workers else "reset", detail=back)
    # New weights also record the unload of an adapter.
    worker, recorded = min(fresh, key=lambda each: isinstance(each[1].command, UnloadLora))
    command = recorded.command
    workers = () if worker is None else tuple(sorted({each for each, _ in fresh if each is not None}))
    return replace(
        event,
        what=command.command,
        workers=workers[:MAX_NAMED],
        num_workers=len(workers),
        id=command.id,
        by=recorded.by,
        detail=_describe_command(command)[:MAX_DETAIL_CHARS],
    )


def _describe_command(command: AnyCommand) -> str:
    match command:
        case Pause(mode=mode):
            return mode
        case Drain():
            return "drain"
        case UpdateWeights(version=version, label=label) | FinishWeightUpdate(version=version, label=label):
            return f"v{version}" + (f" “{label}”" if label else "")
        case LoadLora(name=name, version=version):
            return f"{name} v{version}"
        case UnloadLora(name=name):
            return name
    return ""


@dataclass(slots=True)
class _Seen:
    """A worker as it was seen last."""

    presence: WorkerPresence
    at: float
    missed: int = 0
    """Updates without it since then."""

    @property
    def started_at(self) -> float:
        return self.at - self.presence.uptime_s


class WorkerDay:
    """Finds starts, restarts and losses of workers in their presence, which it gets every few seconds.

    Attributes:
        log: the events.
    """

    def __init__(self, now: float) -> None:
        self.log = DayLog(now)
        self._seen: dict[str, _Seen] = {}

    def update(self, workers: Iterable[tuple[WorkerPresence, float]], now: float) -> None:
        """Compare the live workers with those of the last update.

        Of workers that were never seen, only the last start is known, from their uptime.

        Args:
            workers: the last presence of each worker, with the Unix time at which it arrived.
        """
        present = {presence.worker: _Seen(presence, at) for presence, at in workers}
        found = [_find_event(seen, self._seen.pop(name, None)) for name, seen in present.items()]
        for seen in self._seen.values():
            seen.missed += 1
            found.append(_make_event(seen.presence, "gone", seen.at) if seen.missed == GONE_AFTER else None)
        self._seen |= present
        if events := [each for each in found if each is not None]:
            self.log.add(events, now)
        while len(self._seen) > max(MAX_KNOWN, len(present)):
            del self._seen[next(iter(self._seen))]


def _find_event(seen: _Seen, before: _Seen | None) -> DayEvent | None:
    worker = seen.presence
    if before is None:
        return _make_event(worker, "started", seen.started_at)
    if before.presence.incarnation == worker.incarnation:
        return _make_event(worker, "returned", seen.at) if before.missed >= GONE_AFTER else None
    if seen.started_at < before.started_at + SAME_PROCESS_S:
        # Its lease had expired, for example because NATS could not be reached.
        return _make_event(worker, "returned", seen.at)
    return _make_event(worker, "restarted", max(seen.started_at, before.at))


def _make_event(worker: WorkerPresence, what: str, at: float) -> DayEvent:
    detail = (worker.last_error or "")[:MAX_DETAIL_CHARS]
    return DayEvent(at=round(at, 3), what=what, model=worker.model, worker=worker.worker, detail=detail)
