"""JSON types of the events that viewers receive."""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from ....bus.protocol.fleet.standing import RecordedStop
from ....bus.protocol.telemetry.command_book import CommandLine
from ....bus.protocol.telemetry.day_log import DayEvent
from ....bus.protocol.telemetry.series import Series

__all__ = [
    "DAY",
    "EXPERTS",
    "HELLO",
    "PING",
    "SNAPSHOT",
    "Behind",
    "DaySnapshot",
    "EventName",
    "FleetEvent",
    "HelloEvent",
    "HistoryAnswer",
    "ModelLine",
    "QueueLine",
    "StagingCell",
    "TransferLine",
    "WorkerRow",
    "encode_event",
]

EventName: TypeAlias = Literal["hello", "day", "fleet", "experts", "ping"]
HELLO: Final = "hello"
DAY: Final = "day"
SNAPSHOT: Final = "fleet"
EXPERTS: Final = "experts"
PING: Final = b": ping\n\n"
"""A comment, which keeps proxies from closing an idle stream."""


class HelloEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The first event of a stream."""

    v: Literal[1] = 1
    """Version of the event format."""
    fleet: str
    version: str
    """Release of rollbus that this service runs."""
    started_at: float
    """Unix time at which this service started. A different value means a different service with a different history."""
    may_act: bool
    """True if this viewer's token is valid for the admin routes, which change the fleet."""
    may_trace: bool
    """True if this viewer's token is valid for the route that returns a request's timelines."""
    period_s: float
    """Seconds between two `fleet` events."""
    history_step_s: int
    """Seconds between two points of the history."""
    worker_fields: tuple[str, ...]
    """Names of the values in each row of `workers`."""


class StagingCell(msgspec.Struct, frozen=True):
    """Progress of a worker that stages weights on its machine."""

    stage: str
    done_bytes: int
    total_bytes: int
    """0 if unknown."""
    version: int | None
    """Target version of the worker."""


class WorkerRow(msgspec.Struct, frozen=True, array_like=True):
    """One live worker, from its presence."""

    worker: str
    incarnation: str
    model: str
    state: str
    weight_version: int
    epoch: int
    """Epoch of the desired state that the worker has applied, or failed to apply."""
    in_flight: int
    slots: int
    """Number of requests that the worker can run at the same time."""
    waiting: int
    """Number of requests that the worker has accepted and its engine has not started."""
    kv_use: float | None
    """Share of the KV cache that requests use, 0 to 1; None if the engine does not report it."""
    tokens_per_s: float
    """Tokens per second that its engine generated. This and the next three fields cover the last ten seconds."""
    first_token_s: float | None
    """Mean seconds from the offer of a request to its first token; None without a first token."""
    between_tokens_s: float | None
    """Mean seconds for each token after the first; None without a later token."""
    prefix_hit: float | None
    """Share of looked-up prompt tokens that the prefix cache had, 0 to 1; None without a lookup."""
    role: str | None
    """Role of the worker; None while its engine starts."""
    last_error: str | None
    staging: StagingCell | None
    """None if the worker stages no weights."""
    uptime_s: float
    seen_s_ago: float
    """Seconds since the last presence of the worker."""
    host: str | None
    """Name of its machine; with `pid` and `log`, null if its release does not announce it."""
    pid: int | None
    log: str | None
    """Name of its log on that machine: a file, or `journal`."""


class QueueLine(msgspec.Struct, frozen=True, kw_only=True):
    """One lane of a model's queue."""

    model: str
    lane: str
    waiting: int
    """Number of requests that the queue has delivered to no worker."""
    in_hand: int
    """Number of requests that the queue has delivered to a worker and that the worker has not acked."""
    clients: dict[str, int] | None = None
    """Number of these requests by client; None if this service has no permission to list them, or if that failed."""


class Behind(msgspec.Struct, frozen=True):
    """A worker that has not reached the desired state."""

    worker: str
    why: str


class TransferLine(msgspec.Struct, frozen=True, kw_only=True):
    """An open transfer of weights."""

    by: str
    """Its owner."""
    age_s: float
    left_s: float
    """Seconds until it ends, unless a command arrives; 0 during a command."""
    chunks: int
    workers: int
    """Number of workers that take part."""


class ModelLine(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of a model's workers."""

    model: str
    epoch: int
    """Number of recorded commands."""
    pause: str | None
    """`keep`, `wait`, `abort` or `drain`; None if all workers of the model should serve."""
    paused_since: float | None
    """Unix time of the command that set `pause`, by the clock of its author; None if the model is not paused, or if the
    release of the author does not say."""
    weight_version: int | None
    """Target version of all workers of the model; None if no version is recorded."""
    label: str | None
    """The trainer's label of that version."""
    behind: tuple[Behind, ...]
    stops: tuple[RecordedStop, ...]
    """Recorded pauses, drains and sleeps, with their authors."""
    transfers: tuple[TransferLine, ...]


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    at: float
    """Unix time."""
    bus_up: bool
    """True if the service is connected to NATS. Otherwise, workers and queues have their last known values."""
    problem: str | None
    """Reason why a part of this event is old or missing."""
    workers: tuple[WorkerRow, ...]
    queues: tuple[QueueLine, ...]
    queue_problems: dict[str, str]
    """By model: the reason why its queue could not be read."""
    models: tuple[ModelLine, ...]
    commands: tuple[CommandLine, ...]
    """The last twenty commands that the service received while there were viewers, newest first."""
    history_number: int
    """Number of the history's last point. `GET /v1/rl/history?since=` returns the points after a number."""


class DaySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded commands of the last day, and the starts and losses of workers."""

    commands: list[DayEvent]
    """Oldest first, from the store of desired states, which keeps the last 64 commands of each model."""
    commands_since: float
    """Unix time before which commands are missing; 0: none is missing."""
    workers: list[DayEvent]
    """Oldest first."""
    workers_since: float
    """Unix time from which starts and losses are complete: this service started, or removed older events. Of the time
    before, only the last start of each worker is known."""
    problem: str | None
    """Reason why the commands could not be read."""


class HistoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The points of the last hour, or those after `since`."""

    number: int
    """Number of the last point, for the next `since`."""
    step_s: int
    """Seconds between points."""
    end: float
    """Unix time of the last point, exact enough for the axis of a chart."""
    fleet: Series
    models: dict[str, Series]
    workers: dict[str, Series]
    """The requested worker."""


def encode_event(name: EventName, value: Any) -> bytes:
    """Encode one server-sent event. The JSON has no line break, so no value can end the event early."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
