"""Parts of the `fleet` event, from presence, queues and desired states."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ....bus import QueueDepth
from ....bus.client.fleet_watch import HeardWorker
from ....bus.protocol.fleet.behind import why_behind
from ....bus.protocol.fleet.desired import WEIGHTS
from ....bus.protocol.fleet.presence_table import slots_of
from ....bus.protocol.fleet.standing import open_transfers, recorded_stops
from ....bus.protocol.telemetry.fleet_rates import FleetRates
from ....schemas.control import Drain, FinishWeightUpdate, Pause, UpdateWeights
from ....schemas.desired import DesiredState
from ....schemas.presence import WorkerPresence
from ....schemas.request import Lane
from ....schemas.weights import OpenTransfer
from .events import Behind, ModelLine, QueueLine, StagingCell, TransferLine, WorkerRow
from .points import waiting_at

__all__ = ["model_lines", "queue_lines", "worker_row"]

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
        kv_use=_rounded(kv_use),
        tokens_per_s=round(known.tokens_per_s, 1),
        first_token_s=_rounded(known.first_token_s),
        between_tokens_s=_rounded(known.between_tokens_s, 6),
        prefix_hit=_rounded(known.prefix_hit),
        role=None if capabilities is None else capabilities.role,
        last_error=None if worker.last_error is None else worker.last_error[:MAX_ERROR_CHARS],
        staging=_staging_cell(worker),
        uptime_s=round(worker.uptime_s, 1),
        seen_s_ago=round(max(now - heard.heard_at, 0.0), 1),
        host=worker.host,
        pid=worker.pid,
        log=worker.log,
    )


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _staging_cell(worker: WorkerPresence) -> StagingCell | None:
    staging = worker.staging
    if staging is None:
        return None
    return StagingCell(staging.stage, staging.done_bytes, staging.total_bytes, worker.target_version)


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
    by_model: dict[str, list[WorkerPresence]] = {model: [] for model in desired}
    for worker in workers:
        by_model.setdefault(worker.model, []).append(worker)
    for model, its_workers in sorted(by_model.items()):
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
            stops=tuple(recorded_stops({model: state})),
            transfers=tuple(_transfer_line(*found) for found in open_transfers(its_workers).values()),
        )


def _transfer_line(found: OpenTransfer, workers: list[str]) -> TransferLine:
    return TransferLine(by=found.by, age_s=found.age_s, left_s=found.left_s, chunks=found.chunks, workers=len(workers))


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
