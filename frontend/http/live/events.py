"""The events that viewers receive, made from presence, queues and desired states."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from ....bus import QueueDepth
from ....bus.client.config import Durations
from ....bus.client.fleet_state import FleetWatch, HeardWorker
from ....bus.protocol.fleet.desired import WEIGHTS, RecordedStop, list_stops, why_behind
from ....bus.protocol.fleet.presence import by_model, open_transfers, slots_of
from ....bus.protocol.telemetry.command_book import CommandLine
from ....bus.protocol.telemetry.day_log import DayEvent, DayLog, WorkerDay, command_event
from ....bus.protocol.telemetry.rates import FleetRates, Point, Rates, Series
from ....schemas.control import DesiredState, Drain, FinishWeightUpdate, Pause, UpdateWeights
from ....schemas.errors import RollbusError
from ....schemas.limits import MAX_TIMEOUT_S
from ....schemas.presence import WorkerPresence
from ....schemas.request import Lane
from ...follow import Heard

logger = logging.getLogger(__name__)


EventName: TypeAlias = Literal["hello", "day", "fleet", "experts", "ping"]


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
    loan_left_s: int | None
    """Seconds until the loan of the worker ends, rounded up to minutes; 0: it is over. None: the worker is not lent."""


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


MAX_MODELS: Final = 256
"""Models whose commands are read. Workers choose the names of models."""


class FleetDay:
    """Collects the events of the last day."""

    def __init__(self) -> None:
        self._workers = WorkerDay(time.time())
        self._commands = DayLog()
        self._problem: str | None = None
        # By model: the bucket and the epoch for which the commands were read. Workers may announce any epoch.
        self._read: dict[str, tuple[str, int]] = {}
        # By model: sequence number and epoch of the last state that was read.
        self._last: dict[str, tuple[int, int]] = {}

    def update_workers(self, workers: Iterable[HeardWorker]) -> None:
        """Compare the live workers with those of the last update."""
        now, offset = time.time(), time.time() - time.monotonic()
        self._workers.update(((presence, heard_at + offset) for presence, heard_at in workers), now)

    async def read_announced(self, watch: FleetWatch, workers: Iterable[HeardWorker]) -> None:
        """Read the new commands of the models whose workers announce an epoch that was not read.

        The store keeps 64 commands of a model. A later reader would miss those of a fleet that is updated often.
        """
        epochs: dict[str, int] = {}
        for worker, _ in workers:
            epochs[worker.model] = max(epochs.get(worker.model, 0), worker.epoch)
        await self._read_all(watch, {model: (self._bucket(model), epoch) for model, epoch in epochs.items()})

    async def read(self, watch: FleetWatch, desired: Mapping[str, DesiredState]) -> None:
        """Read the new commands of all models."""
        await self._read_all(watch, {model: (state.bucket, state.epoch) for model, state in desired.items()})

    def _bucket(self, model: str) -> str:
        return self._read[model][0] if model in self._read else ""

    async def _read_all(self, watch: FleetWatch, wanted: Mapping[str, tuple[str, int]]) -> None:
        problem = None
        for model, until in wanted.items():
            if self._read.get(model) == until or (model not in self._read and len(self._read) >= MAX_MODELS):
                continue
            try:
                await self._read_model(watch, model, until)
            except RollbusError as error:
                problem = f"cannot read the recorded commands of {model}: {error}"
        if problem not in (None, self._problem):
            logger.warning("live.day_read_failed problem=%s", problem)
        self._problem = problem

    async def _read_model(self, watch: FleetWatch, model: str, until: tuple[str, int]) -> None:
        # Sequence numbers begin again in a new bucket.
        after, epoch = self._last.get(model, (0, 0)) if self._bucket(model) in ("", until[0]) else (0, 0)
        found = await watch.history(model, after)
        if after == 0 and found and found[0].state.epoch > 1:
            self._commands.since = max(self._commands.since, found[0].at)
        events = []
        for sequence, at, state in found:
            # A state that was signed again has the epoch of the state before it.
            if state.epoch > epoch and (event := command_event(state, at)) is not None:
                events.append(event)
            self._last[model], epoch = (sequence, state.epoch), state.epoch
        self._read[model] = until
        self._commands.add(events, time.time())

    def snapshot(self) -> DaySnapshot:
        """Return the events of the last day."""
        return DaySnapshot(
            commands=self._commands.events,
            commands_since=round(self._commands.since, 3),
            workers=self._workers.log.events,
            workers_since=round(self._workers.log.since, 3),
            problem=self._problem,
        )


class QueueWaits:
    """Mean time that this service's requests waited in the queue, for each step."""

    def __init__(self) -> None:
        # By model: number of requests and their total seconds.
        self._before: dict[str, tuple[int, float]] = {}

    def step(self, waits: Mapping[str, Durations]) -> tuple[float, dict[str, float]]:
        """Return the mean seconds since the last step, over all models and for each model; NaN without a request."""
        now = {model: (sum(durations.counts), durations.total_s) for model, durations in waits.items()}
        news: dict[str, tuple[int, float]] = {}
        for model, (count, seconds) in now.items():
            before = self._before.get(model, (0, 0.0))
            news[model] = count - before[0], seconds - before[1]
        self._before = now
        total = sum(count for count, _ in news.values()), sum(seconds for _, seconds in news.values())
        return _mean(*total), {model: _mean(*found) for model, found in news.items()}


def _mean(count: int, seconds: float) -> float:
    return seconds / count if count > 0 else math.nan


def waiting_at(worker: WorkerPresence) -> int:
    """Return the number of requests that a worker has accepted and its engine has not started."""
    return worker.queued + (0 if worker.engine_stats is None else worker.engine_stats.waiting or 0)


def worker_points(
    heard: Heard, queues: Iterable[QueueDepth], waits: tuple[float, Mapping[str, float]]
) -> tuple[Point, dict[str, Point], dict[str, Point]]:
    """Return the points of one step: for the fleet, for each model and for each worker.

    Args:
        waits: mean seconds in the queue, for the fleet and by model.
    """
    waiting, in_flight = Counter[str](), Counter[str]()
    workers, models = dict[str, Point](), dict[str, Point]()
    for each in heard.workers.values():
        worker, at_worker = each.presence, waiting_at(each.presence)
        waiting[worker.model] += at_worker
        in_flight[worker.model] += worker.in_flight
        workers[worker.worker] = _point(heard.rates.of(worker.worker), math.nan, at_worker, worker.in_flight)
    for depth in queues:
        if depth.model in waiting:
            waiting[depth.model] += depth.waiting
    fleet_wait, waits_by_model = waits
    rates = heard.rates.of_models()
    for model, count in waiting.items():
        wait = waits_by_model.get(model, math.nan)
        models[model] = _point(rates.get(model, Rates()), wait, count, in_flight[model])
    fleet = _point(heard.rates.of_fleet(), fleet_wait, waiting.total(), in_flight.total())
    return fleet, models, workers


def _point(rates: Rates, queue_wait_s: float, waiting: int, in_flight: int) -> Point:
    return Point(
        tokens_per_s=rates.tokens_per_s,
        first_token_s=_or_nan(rates.first_token_s),
        between_tokens_s=_or_nan(rates.between_tokens_s),
        queue_wait_s=queue_wait_s,
        waiting=waiting,
        in_flight=in_flight,
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


PAUSE: Final = "pause"
"""Register that states whether workers should serve."""
MAX_CLIENTS: Final = 50
"""Limit on listed clients of a lane."""
MAX_ERROR_CHARS: Final = 300
"""Limit for a worker's last error, so that the event stays small if a thousand workers have failed."""


def worker_row(heard: HeardWorker, rates: FleetRates, now: float) -> WorkerRow:
    """Return the row of a worker.

    Args:
        now: time on the clock of `heard.heard_at`.
    """
    worker = heard.presence
    capabilities, stats, known = worker.capabilities, worker.engine_stats, rates.of(worker.worker)
    kv_use = None if stats is None else stats.kv_cache_use
    staging, loan_s = worker.staging, worker.loan_left_s
    cell = None
    if staging is not None:
        cell = StagingCell(staging.stage, staging.done_bytes, staging.total_bytes, worker.target_version)
    return WorkerRow(
        worker=worker.worker,
        incarnation=worker.incarnation,
        model=worker.model,
        state=worker.state,
        weight_version=worker.weight_version,
        epoch=worker.epoch,
        in_flight=worker.in_flight,
        slots=slots_of(worker),
        waiting=waiting_at(worker),
        kv_use=_round(kv_use),
        tokens_per_s=round(known.tokens_per_s, 1),
        first_token_s=_round(known.first_token_s),
        between_tokens_s=_round(known.between_tokens_s, 6),
        prefix_hit=_round(known.prefix_hit),
        role=None if capabilities is None else capabilities.role,
        last_error=None if worker.last_error is None else worker.last_error[:MAX_ERROR_CHARS],
        staging=cell,
        uptime_s=round(worker.uptime_s, 1),
        seen_s_ago=round(max(now - heard.heard_at, 0.0), 1),
        host=worker.host,
        pid=worker.pid,
        log=worker.log,
        # In minutes, so that the row does not differ each second.
        loan_left_s=None if loan_s is None else 60 * math.ceil(min(loan_s, MAX_TIMEOUT_S) / 60),
    )


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def queue_lines(
    depths: Iterable[QueueDepth], clients: Mapping[tuple[str, Lane, str], int] | None
) -> Iterator[QueueLine]:
    """Yield a line for each lane.

    Args:
        clients: number of requests by model, lane and client; None if unknown. A lane lists the `MAX_CLIENTS` clients
            with the most requests.
    """
    by_lane: dict[tuple[str, Lane], Counter[str]] = {}
    for (model, lane, client), count in (clients or {}).items():
        by_lane.setdefault((model, lane), Counter())[client] = count
    for depth in depths:
        listed = dict(by_lane.get((depth.model, depth.lane), Counter()).most_common(MAX_CLIENTS))
        yield QueueLine(
            model=depth.model,
            lane=depth.lane,
            waiting=depth.waiting,
            in_hand=depth.in_hand,
            clients=None if clients is None else listed,
        )


def model_lines(workers: Iterable[WorkerPresence], desired: Mapping[str, DesiredState]) -> Iterator[ModelLine]:
    """Yield a line for each model that has live workers or a desired state, sorted by name."""
    for model, its_workers in sorted(by_model(workers, desired).items()):
        state = desired.get(model, DesiredState(model=model))
        pause = _pause(state)
        version, label = _weights(state)
        behind = (Behind(each.worker, why) for each in its_workers if (why := why_behind(each, state)) is not None)
        yield ModelLine(
            model=model,
            epoch=state.epoch,
            pause=pause,
            paused_since=None if pause is None else state.registers[PAUSE].at or None,
            weight_version=version,
            label=label,
            behind=tuple(behind),
            stops=tuple(list_stops({model: state})),
            transfers=tuple(
                TransferLine(by=each.by, age_s=each.age_s, left_s=each.left_s, chunks=each.chunks, workers=len(names))
                for each, names in open_transfers(its_workers).values()
            ),
        )


def _pause(state: DesiredState) -> str | None:
    command = state.registers[PAUSE].command if PAUSE in state.registers else None
    if isinstance(command, Pause):
        return command.mode
    return "drain" if isinstance(command, Drain) else None


def _weights(state: DesiredState) -> tuple[int | None, str | None]:
    command = state.registers[WEIGHTS].command if WEIGHTS in state.registers else None
    if isinstance(command, UpdateWeights | FinishWeightUpdate):
        return command.version, command.label
    return None, None
