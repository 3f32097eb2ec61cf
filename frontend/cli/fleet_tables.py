"""Formats the state of a fleet as tables and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ...bus import FleetState, QueueDepth
from ...bus.protocol.fleet.presence_table import slots_of
from ...bus.protocol.fleet.standing import open_transfers, recorded_stops, stop_of
from ...bus.worker_metrics import prefix_cache_hit_ratio
from ...schemas.control import LORA_REGISTER, Drain, FinishWeightUpdate, LoadLora, Pause, Resume, Sleep, UpdateWeights
from ...schemas.desired import DesiredState, Recorded
from ...schemas.presence import Capabilities, WorkerPresence, WorkerState
from ...schemas.weights import PublishedVersion
from .byte_counts import size, staging_text
from .tables import NONE

__all__ = [
    "DESIRED_COLUMNS",
    "ENGINE_COLUMNS",
    "PREFIX_COLUMNS",
    "PROBLEM_COLUMNS",
    "PUBLISHED_COLUMNS",
    "QUEUE_COLUMNS",
    "STOP_COLUMNS",
    "TRANSFER_COLUMNS",
    "WORKER_COLUMNS",
    "desired_rows",
    "engine_rows",
    "in_flight_cell",
    "note_cell",
    "prefix_rows",
    "problem_rows",
    "published_rows",
    "queue_rows",
    "severity",
    "state_as_json",
    "state_cell",
    "stop_rows",
    "told_cells",
    "transfer_rows",
    "version_cell",
    "worker_rows",
]

WORKER_COLUMNS = (
    *("state", "worker", "model", "role", "version", "in flight", "queued"),
    *("LoRAs", "epoch", "uptime", "lease age", "note"),
)
LANES = ("resume", "high", "normal", "low")
QUEUE_COLUMNS = ("queue", *LANES, "in hand", "replicas")
PROBLEM_COLUMNS = ("queue", "problem")
DESIRED_COLUMNS = ("desired of", "epoch", "version", "weights from", "state", "LoRAs")
ENGINE_COLUMNS = ("engine", "dtype", "max_model_len", "max_num_seqs", "routed experts", "can", "workers")
STOP_COLUMNS = ("stopped", "state", "by", "since")
TRANSFER_COLUMNS = ("transfer of weights", "by", "open for", "chunks", "ends in", "workers")
PUBLISHED_COLUMNS = ("published of", "version", "stored", "model", "after anchor", "store used", "store limit")
PREFIX_COLUMNS = (
    *("worker", "cache hits", "prompt tokens", "recomputed"),
    *("queued", "placed", "prefix", "group", "session", "able", "refused"),
)
NUM_NAMED: Final = 3
"""Maximum number of workers listed by name. The table shows only the number of the others."""
FRESH_S: Final = 2.0
"""Age up to which a lease is not shown. Workers renew it every second."""
WORST_FIRST: Final = tuple(
    map(
        WorkerState,
        (
            *("failed", "poisoned", "outdated", "waiting_for_weights", "fenced", "unknown", "stopped"),
            *("starting", "updating", "asleep", "drained", "paused", "serving"),
        ),
    )
)


def severity(worker: WorkerPresence) -> tuple[int, bool, str]:
    """Return a sort key that puts the worst state first, then workers with an error, then names in order."""
    return WORST_FIRST.index(worker.state), not worker.last_error, worker.worker


def worker_rows(workers: Sequence[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `WORKER_COLUMNS` for each worker, the worst first."""
    has_roles = any(worker.capabilities is not None and worker.capabilities.role != "both" for worker in workers)
    return [_worker_row(worker, has_roles=has_roles) for worker in sorted(workers, key=severity)]


def _worker_row(worker: WorkerPresence, *, has_roles: bool) -> list[str]:
    return [
        state_cell(worker),
        worker.worker,
        worker.model,
        worker.capabilities.role if has_roles and worker.capabilities is not None else NONE,
        version_cell(worker),
        in_flight_cell(worker),
        str(worker.queued),
        ", ".join(f"{lora.name} ({lora.version})" for lora in worker.loras) or NONE,
        str(worker.epoch),
        _duration(worker.uptime_s),
        NONE if worker.lease_age_s < FRESH_S else f"{worker.lease_age_s:.0f} s",
        note_cell(worker),
    ]


def state_cell(worker: WorkerPresence) -> str:
    """Return the state of a worker and its pause mode."""
    return str(worker.state) if worker.pause_mode is None else f"{worker.state} ({worker.pause_mode})"


def version_cell(worker: WorkerPresence) -> str:
    """Return the version of the weights, for example `3 of 4` if 4 is the target version."""
    target = worker.target_version
    is_there = target is None or target == worker.weight_version
    return str(worker.weight_version) if is_there else f"{worker.weight_version} of {target}"


def in_flight_cell(worker: WorkerPresence) -> str:
    """Return the requests in flight and the slots."""
    return f"{worker.in_flight:,}/{slots_of(worker):,}"


def note_cell(worker: WorkerPresence) -> str:
    """Return the progress of staging and the last error."""
    staging = worker.staging
    stages = "" if staging is None else f"{staging_text(staging)} from {staging.source}"
    return "; ".join(filter(None, (stages, worker.last_error)))


def queue_rows(depths: Sequence[QueueDepth]) -> list[list[str]]:
    """Return the cells of `QUEUE_COLUMNS` for each model: requests that wait in each lane, and requests in hand.

    A request is in hand from its delivery to a worker until the worker acks the queue message. Without requests in any
    queue, and without a cluster, there are no rows.
    """
    if not any(depth.waiting or depth.in_hand or depth.leader for depth in depths):
        return []
    waiting: dict[tuple[str, str], int] = {(depth.model, depth.lane): depth.waiting for depth in depths}
    in_hand = {model: sum(depth.in_hand for depth in depths if depth.model == model) for model, _ in waiting}
    return [
        [
            model,
            *(str(waiting[model, lane]) if (model, lane) in waiting else NONE for lane in LANES),
            str(count),
            _replicas([depth for depth in depths if depth.model == model]),
        ]
        for model, count in in_hand.items()
    ]


def problem_rows(problems: Mapping[str, str]) -> list[list[str]]:
    """Return the cells of `PROBLEM_COLUMNS` for each queue that does not answer: queue and reason."""
    return [[model, problem] for model, problem in sorted(problems.items())]


def _replicas(lanes: Sequence[QueueDepth]) -> str:
    """Return the replicas of the lanes of a model and the servers that are behind. Return a dash without a cluster."""
    if not any(lane.leader for lane in lanes):
        return NONE
    # The lag differs by lane. --json shows it.
    behind = sorted({server.partition(" ")[0] for lane in lanes for server in lane.behind})
    return str(min(lane.replicas for lane in lanes)) + (f", behind: {', '.join(behind)}" if behind else "")


def desired_rows(desired: Mapping[str, DesiredState]) -> list[list[str]]:
    """Return the cells of `DESIRED_COLUMNS` for each model, and for each worker with a desired state of its own."""
    rows = []
    for model, state in sorted(desired.items()):
        rows.append([model, str(state.epoch), *told_cells(state.registers)])
        for worker, registers in sorted(state.workers.items()):
            rows.append([f"{model}, only {worker}", NONE, *told_cells(registers)])
    return rows


def stop_rows(desired: Mapping[str, DesiredState]) -> list[list[str]]:
    """Return the cells of `STOP_COLUMNS` for each recorded pause, drain and sleep."""
    return [
        [
            stop.model if stop.worker is None else f"{stop.model}, only {stop.worker}",
            stop.what,
            stop.by or NONE,
            NONE if stop.since is None else f"{datetime.fromtimestamp(stop.since).astimezone():%Y-%m-%d %H:%M:%S}",
        ]
        for stop in recorded_stops(desired)
    ]


def transfer_rows(workers: Iterable[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `TRANSFER_COLUMNS` for each open transfer."""
    return [
        [found.id, found.by, _duration(found.age_s), str(found.chunks), _duration(found.left_s), _named(names)]
        for found, names in open_transfers(workers).values()
    ]


def told_cells(registers: Mapping[str, Recorded]) -> list[str]:
    """Return version, source, state and adapters from the recorded registers."""
    version = source = NONE
    states, loras = [], []
    for register, recorded in sorted(registers.items()):
        match recorded.command:
            case UpdateWeights() as update:
                version, source = f"{update.version}{_unpinned(update)}", str(update.source)
            case FinishWeightUpdate() as finish:
                version, source = str(finish.version), "the transfer engine"
            case Pause() | Drain() | Sleep():
                states.append(stop_of(recorded) or "")
            case Resume():
                states.append("resumed")
            case LoadLora() as load:
                loras.append(f"{register.removeprefix(LORA_REGISTER)} ({load.version}{_unpinned(load)})")
            case _:
                # Wake, flush and unload have no cell.
                pass
    return [version, source, ", ".join(states) or NONE, ", ".join(loras) or NONE]


def _unpinned(command: UpdateWeights | LoadLora) -> str:
    return ", unpinned" if command.digest is None else ""


def engine_rows(workers: Iterable[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `ENGINE_COLUMNS`, one row for all workers with equal capabilities.

    The role is not compared, because the table of the workers shows it.
    """
    alike: dict[Capabilities, list[str]] = {}
    for worker in workers:
        if worker.capabilities is not None:
            alike.setdefault(replace(worker.capabilities, role="both"), []).append(worker.worker)
    return [[*_engine_cells(known), _named(names)] for known, names in alike.items()]


def published_rows(workers: Iterable[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `PUBLISHED_COLUMNS`: the newest published version that workers of each model staged."""
    newest: dict[str, PublishedVersion] = {}
    for worker in workers:
        found, known = worker.published, newest.get(worker.model)
        if found is not None and (known is None or known.version < found.version):
            newest[worker.model] = found
    return [
        [
            model,
            str(found.version),
            size(found.stored_bytes),
            size(found.model_bytes),
            str(found.chain_length),
            size(found.used_bytes),
            size(found.limit_bytes) if found.limit_bytes else NONE,
        ]
        for model, found in sorted(newest.items())
    ]


def prefix_rows(workers: Iterable[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `PREFIX_COLUMNS` for each worker that had a request: cache hits and placed requests."""
    rows = []
    for worker in workers:
        counters, stats = worker.counters, worker.engine_stats
        if counters is None or not (counters.prompt_tokens or counters.placements_refused):
            continue
        ratio = None if stats is None else prefix_cache_hit_ratio(stats)
        rows.append(
            [
                worker.worker,
                NONE if ratio is None else f"{100 * ratio:.1f} %",
                f"{counters.prompt_tokens:,}",
                f"{counters.recomputed_prompt_tokens:,}",
                f"{counters.requests - counters.placed:,}",
                f"{counters.placed:,}",
                f"{counters.placed_prefix:,}",
                f"{counters.placed_group:,}",
                f"{counters.placed_session:,}",
                f"{counters.placed_able:,}",
                f"{counters.placements_refused:,}",
            ]
        )
    return rows


def state_as_json(state: FleetState) -> dict[str, Any]:
    """Return the output of `rollbus status --json`. docs/operate/commands.md lists its names, which do not change."""
    return {
        "fleet": state.fleet,
        "workers": [_without(worker, "v") for worker in state.workers],
        "queues": [msgspec.to_builtins(depth) for depth in state.queues],
        "queue_problems": dict(state.queue_problems),
        "desired": {
            model: _without(desired, "v", "model", "seen", "bucket") for model, desired in state.desired.items()
        },
    }


def _without(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(struct)
    return {name: value for name, value in fields.items() if name not in names}


def _engine_cells(known: Capabilities) -> list[str]:
    routing = known.routed_experts
    can = {
        "weights": known.weight_updates,
        "transfer": known.weight_transfer,
        f"{known.max_loras} LoRAs": known.max_loras > 0,
        "sleep": known.sleep,
        "priority": known.priority,
        f"KV by {(known.kv_connector or NONE).split()[0]}": known.kv_connector is not None,
        f"dp {known.data_parallel_size}": known.data_parallel_size > 1,
    }
    return [
        f"{known.engine} {known.engine_version}",
        known.dtype,
        str(known.max_model_len),
        str(known.max_num_seqs),
        NONE
        if routing is None
        else f"{routing.top_k} of {routing.num_experts} in {routing.num_layers} layers, {routing.dtype}",
        ", ".join(what for what, is_able in can.items() if is_able) or NONE,
    ]


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NUM_NAMED])
    return shown if len(names) <= NUM_NAMED else f"{shown} and {len(names) - NUM_NAMED} more"


def _duration(seconds: float) -> str:
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{secs:02}s" if minutes else f"{secs}s"
