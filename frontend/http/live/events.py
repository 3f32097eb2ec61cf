"""The events that viewers get, as JSON has them."""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from ....bus.protocol.telemetry.command_book import CommandLine
from ....bus.protocol.telemetry.series import Series

__all__ = [
    "EXPERTS",
    "HELLO",
    "PING",
    "SNAPSHOT",
    "Behind",
    "EventName",
    "FleetEvent",
    "HelloEvent",
    "HistoryAnswer",
    "ModelLine",
    "QueueLine",
    "StagingCell",
    "WorkerRow",
    "encode_event",
]

EventName: TypeAlias = Literal["hello", "fleet", "experts", "ping"]
HELLO: Final = "hello"
SNAPSHOT: Final = "fleet"
EXPERTS: Final = "experts"
PING: Final = b": ping\n\n"
"""A comment, so that proxies do not take a stream for idle."""


class HelloEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The first event of a stream."""

    v: Literal[1] = 1
    """Of the events' form."""
    fleet: str
    version: str
    """Of this service's rollbus."""
    started_at: float
    """Unix time at which this service began; another value is another service, with another history."""
    may_act: bool
    """This viewer's token opens the admin routes that change the fleet."""
    may_trace: bool
    """And that which tells what became of a request."""
    period_s: float
    """Seconds between two `fleet` events."""
    history_step_s: int
    """Seconds between two points of the history."""
    worker_fields: tuple[str, ...]
    """What stands in each row of `workers`."""


class StagingCell(msgspec.Struct, frozen=True):
    """How far a worker is with bringing weights to its machine."""

    stage: str
    done_bytes: int
    total_bytes: int
    """0: not known."""
    version: int | None
    """Of the weights that the worker should have."""


class WorkerRow(msgspec.Struct, frozen=True, array_like=True):
    """One live worker, as it announces itself."""

    worker: str
    incarnation: str
    model: str
    state: str
    weight_version: int
    epoch: int
    """Of the desired state that the worker has brought itself to, or failed to."""
    in_flight: int
    slots: int
    """Requests that it runs at once."""
    waiting: int
    """Requests that the worker has and its engine has not begun."""
    kv_use: float | None
    """Share of the KV cache that requests hold, 0 to 1; None: the engine does not say."""
    tokens_per_s: float
    """Tokens that its engine made, over the last ten seconds; so are the next three."""
    first_token_s: float | None
    """Mean seconds from the offer of a request to its first token; None: there was none."""
    between_tokens_s: float | None
    """Mean seconds for each token after the first; None: there was none."""
    prefix_hit: float | None
    """Share of looked-up prompt tokens that were in the prefix cache, 0 to 1; None: none were looked up."""
    role: str | None
    """None while the engine starts."""
    last_error: str | None
    staging: StagingCell | None
    """None: the worker stages nothing."""
    uptime_s: float
    seen_s_ago: float
    """Seconds since the worker was last heard."""


class QueueLine(msgspec.Struct, frozen=True, kw_only=True):
    """One lane of a model's queue."""

    model: str
    lane: str
    waiting: int
    """Requests that no worker has been handed."""
    in_hand: int
    """Requests that a worker was handed and has not acked."""
    clients: dict[str, int] | None = None
    """How many of them each client has there; None: this service may not or cannot list them."""


class Behind(msgspec.Struct, frozen=True):
    """A worker that has not done what it was told."""

    worker: str
    why: str


class ModelLine(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of a model were told."""

    model: str
    epoch: int
    """Commands recorded so far."""
    pause: str | None
    """`keep`, `wait`, `abort` or `drain`; None: all of its workers should serve."""
    paused_since: float | None
    """Unix time of that command; None: not paused, or not known any more."""
    weight_version: int | None
    """That all of its workers should have; None: nothing is recorded."""
    label: str | None
    """What the trainer calls that version."""
    behind: tuple[Behind, ...]


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    at: float
    """Unix time."""
    bus_up: bool
    """NATS is connected; else workers and queues are as they were last heard."""
    problem: str | None
    """Why something of this is old or missing."""
    workers: tuple[WorkerRow, ...]
    queues: tuple[QueueLine, ...]
    queue_problems: dict[str, str]
    """By model: why its queue does not answer."""
    models: tuple[ModelLine, ...]
    commands: tuple[CommandLine, ...]
    """The last twenty that were heard while somebody watched, the newest first."""
    history_number: int
    """Of the last point of the history: what is after another number can be asked for."""


class HistoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The last hour, or what is new of it."""

    number: int
    """Of the last point; the next `since`."""
    step_s: int
    """Seconds between points."""
    end: float
    """Unix time of the last point, near enough for an axis."""
    fleet: Series
    models: dict[str, Series]
    workers: dict[str, Series]
    """The worker that was asked for."""


def encode_event(name: EventName, value: Any) -> bytes:
    """Encode one server-sent event. JSON has no line break, so that nothing in it can end the event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
