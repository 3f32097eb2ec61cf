"""The state of a fleet as tables and as JSON, shown once or every second by `rollbus status`.

Commands that need at least one serving worker find it here.
"""

import argparse
import asyncio
import contextlib
import math
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from .... import bus
from ....bus import BusBroken, Client, FleetState, InvalidRequest, NoWorkers, QueueDepth
from ....bus.nats.connection import connected, subscribe
from ....bus.nats.library import Msg
from ....bus.nats.server import Server
from ....bus.protocol.fleet.desired import list_stops, stop_of
from ....bus.protocol.fleet.presence import FleetSnapshot, accepts_whole_requests, open_transfers, slots_of
from ....bus.subjects import ALL_PRESENCES, Subjects
from ....bus.thread_calls import is_set_within
from ....bus.worker_metrics import prefix_cache_hit_ratio
from ....schemas import control
from ....schemas.checks import list_names
from ....schemas.decoding import JsonObject
from ....schemas.presence import Capabilities, WorkerPresence, WorkerState
from ....schemas.weights import PublishedVersion
from ..console import note, print_json, program, size, staging_text, write
from ..exits import CommandFailed, ExitCode
from ..options import START_SOME, connect, no_workers, without_password
from ..tables import NONE, lay_out

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
    """Return the rest of a loan, the progress of staging, and the last error."""
    staging = worker.staging
    stages = "" if staging is None else f"{staging_text(staging)} from {staging.source}"
    loan = "" if not worker.loan_left_s else f"lent, {_duration(worker.loan_left_s)} left"
    return "; ".join(filter(None, (loan, stages, worker.last_error)))


def queue_rows(depths: Sequence[QueueDepth]) -> list[list[str]]:
    """Return the cells of `QUEUE_COLUMNS` for each model: requests that wait in each lane, and requests in hand.

    A request is in hand from its delivery to a worker until the worker acks the queue message. Without requests in any
    queue, and without a cluster, there are no rows.
    """
    if not any(depth.waiting or depth.in_hand or depth.leader for depth in depths):
        return []
    rows = []
    for model in dict.fromkeys(depth.model for depth in depths):
        lanes = [depth for depth in depths if depth.model == model]
        waiting: dict[str, str] = {lane.lane: str(lane.waiting) for lane in lanes}
        in_hand = str(sum(lane.in_hand for lane in lanes))
        rows.append([model, *(waiting.get(lane, NONE) for lane in LANES), in_hand, _replicas(lanes)])
    return rows


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


def desired_rows(desired: Mapping[str, control.DesiredState]) -> list[list[str]]:
    """Return the cells of `DESIRED_COLUMNS` for each model, and for each worker with a desired state of its own."""
    rows = []
    for model, state in sorted(desired.items()):
        rows.append([model, str(state.epoch), *told_cells(state.registers)])
        for worker, registers in sorted(state.workers.items()):
            rows.append([f"{model}, only {worker}", NONE, *told_cells(registers)])
    return rows


def stop_rows(desired: Mapping[str, control.DesiredState]) -> list[list[str]]:
    """Return the cells of `STOP_COLUMNS` for each recorded pause, drain and sleep."""
    rows = []
    for stop in list_stops(desired):
        since = NONE if stop.since is None else format_time(datetime.fromtimestamp(stop.since))
        of = stop.model if stop.worker is None else f"{stop.model}, only {stop.worker}"
        rows.append([of, stop.what, stop.by or NONE, since])
    return rows


def format_time(time: datetime) -> str:
    """Return a time as text in the time zone of this machine."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def transfer_rows(workers: Iterable[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `TRANSFER_COLUMNS` for each open transfer."""
    rows = []
    for found, names in open_transfers(workers).values():
        workers_cell = list_names(names, limit=NUM_NAMED)
        rows.append(
            [found.id, found.by, _duration(found.age_s), str(found.chunks), _duration(found.left_s), workers_cell]
        )
    return rows


def told_cells(registers: Mapping[str, control.Recorded]) -> list[str]:
    """Return version, source, state and adapters from the recorded registers."""
    version = source = NONE
    states, loras = [], []
    for register, recorded in sorted(registers.items()):
        match recorded.command:
            case control.UpdateWeights() as update:
                version, source = f"{update.version}{_format_pin(update)}", str(update.source)
            case control.FinishWeightUpdate() as finish:
                version, source = str(finish.version), "the transfer engine"
            case control.Pause() | control.Drain() | control.Sleep():
                states.append(stop_of(recorded) or "")
            case control.Resume():
                states.append("resumed")
            case control.LoadLora() as load:
                loras.append(f"{register.removeprefix(control.LORA_REGISTER)} ({load.version}{_format_pin(load)})")
            case _:
                # Wake, flush and unload have no cell.
                pass
    return [version, source, ", ".join(states) or NONE, ", ".join(loras) or NONE]


def _format_pin(command: control.UpdateWeights | control.LoadLora) -> str:
    return ", unpinned" if command.digest is None else ""


def engine_rows(workers: Iterable[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `ENGINE_COLUMNS`, one row for all workers with equal capabilities.

    The role is not compared, because the table of the workers shows it.
    """
    alike: dict[Capabilities, list[str]] = {}
    for worker in workers:
        if worker.capabilities is not None:
            alike.setdefault(replace(worker.capabilities, role="both"), []).append(worker.worker)
    return [[*_engine_cells(known), list_names(names, limit=NUM_NAMED)] for known, names in alike.items()]


def published_rows(workers: Iterable[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `PUBLISHED_COLUMNS`: the newest published version that workers of each model staged."""
    newest: dict[str, PublishedVersion] = {}
    for worker in workers:
        found, known = worker.published, newest.get(worker.model)
        if found is not None and (known is None or known.version < found.version):
            newest[worker.model] = found
    rows = []
    for model, found in sorted(newest.items()):
        sizes = [size(found.stored_bytes), size(found.model_bytes), str(found.chain_length), size(found.used_bytes)]
        rows.append([model, str(found.version), *sizes, size(found.limit_bytes) if found.limit_bytes else NONE])
    return rows


def prefix_rows(workers: Iterable[WorkerPresence]) -> list[list[str]]:
    """Return the cells of `PREFIX_COLUMNS` for each worker that had a request: cache hits and placed requests."""
    rows = []
    for worker in workers:
        counters, stats = worker.counters, worker.engine_stats
        if counters is None or not (counters.prompt_tokens or counters.placements_refused):
            continue
        ratio = None if stats is None else prefix_cache_hit_ratio(stats)
        figures = (
            *(counters.prompt_tokens, counters.recomputed_prompt_tokens),
            *(counters.requests - counters.placed, counters.placed, counters.placed_prefix, counters.placed_group),
            *(counters.placed_session, counters.placed_able, counters.placements_refused),
        )
        hits = NONE if ratio is None else f"{100 * ratio:.1f} %"
        rows.append([worker.worker, hits, *(f"{figure:,}" for figure in figures)])
    return rows


def of_model(state: FleetState, model: str | None) -> FleetState:
    """Return the part of a fleet that serves one model; None for all models."""
    if model is None:
        return state
    return replace(
        state,
        workers=tuple(worker for worker in state.workers if worker.model == model),
        queues=tuple(depth for depth in state.queues if depth.model == model),
        queue_problems={name: why for name, why in state.queue_problems.items() if name == model},
        desired={name: desired for name, desired in state.desired.items() if name == model},
    )


def state_as_json(state: FleetState) -> JsonObject:
    """Return the output of `rollbus status --json`. docs/operate/commands.md names its fields, which do not change."""
    return {
        "fleet": state.fleet,
        "workers": [_without(worker, "v") for worker in state.workers],
        "queues": [msgspec.to_builtins(depth) for depth in state.queues],
        "queue_problems": dict(state.queue_problems),
        "desired": {
            model: _without(desired, "v", "model", "seen", "bucket") for model, desired in state.desired.items()
        },
    }


def _without(struct: msgspec.Struct, *names: str) -> JsonObject:
    fields: JsonObject = msgspec.to_builtins(struct)
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
    rows = NONE
    if routing is not None:
        rows = f"{routing.top_k} of {routing.num_experts} in {routing.num_layers} layers, {routing.dtype}"
    sizes = [known.dtype, str(known.max_model_len), str(known.max_num_seqs)]
    able = ", ".join(what for what, is_able in can.items() if is_able) or NONE
    return [f"{known.engine} {known.engine_version}", *sizes, rows, able]


def _duration(seconds: float) -> str:
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{secs:02}s" if minutes else f"{secs}s"


HEAR_S: Final = 2.0
"""Seconds to listen for presence, which workers publish each second."""
MAX_FLEETS: Final = 16
"""Fleets that an error message names."""


async def fleets_with_workers(nats_url: str, fleet: str) -> set[str]:
    """Return the fleets with live workers at the server, at most `MAX_FLEETS`. Stop when `fleet` is found.

    A user with credentials may read only its own fleet.

    Raises:
        BusBroken: the server cannot be reached.
    """
    server = Server.named(nats_url)
    found: set[str] = set()
    is_own = asyncio.Event()

    async def receive(message: Msg) -> None:
        name = message.subject.split(".")[2]
        with contextlib.suppress(InvalidRequest):
            Subjects(name)
            if len(found) < MAX_FLEETS:
                found.add(name)
        if name == fleet:
            is_own.set()

    async with connected(server, name="rollbus") as nats:
        await subscribe(nats, ALL_PRESENCES if server.credentials is None else Subjects(fleet).presences, receive)
        await is_set_within(is_own, HEAR_S)
    return found | {fleet} if is_own.is_set() else found


def serving_workers(workers: Sequence[WorkerPresence], *, nats_url: str, fleet: str) -> list[WorkerPresence]:
    """Return the workers in `workers` that accept requests now.

    Raises:
        NoWorkers: no worker is live.
        CommandFailed: no worker accepts requests. The message has the state of each worker.
    """
    if not workers:
        raise NoWorkers(message="no worker is live")
    serving = [worker for worker in workers if worker.state is WorkerState.SERVING and accepts_whole_requests(worker)]
    if not serving:
        problem = f"no worker serves in fleet {fleet!r} at {without_password(nats_url)}{_others(workers)}"
        raise CommandFailed(f"{problem}; start one with `rollbus up` or `rollbus worker`", ExitCode.NO_WORKERS)
    return serving


async def warn_of_wait(rb: Client, state: FleetState, *, nats_url: str) -> None:
    """Print on stderr why requests must wait. Print nothing if a worker serves.

    Raises:
        NoWorkers: no worker is live.
        CommandFailed: no worker serves, and requests cannot wait because no worker is paused, updates or starts.
    """
    present = [worker for worker in state.workers if worker.state.is_present and accepts_whole_requests(worker)]
    if not FleetSnapshot(tuple(state.workers)).awaited:
        serving_workers(state.workers, nats_url=nats_url, fleet=state.fleet)
    if any(worker.state is WorkerState.SERVING for worker in present):
        return
    paused = [worker for worker in present if worker.state is WorkerState.PAUSED]
    if not paused:
        note(f"no worker serves now{_others(state.workers)}: the requests wait")
        return
    await rb.fleet.mute_pause()
    times = [await rb.fleet.paused_since(model) for model in {worker.model for worker in paused}]
    since = max((time for time in times if time is not None), default=None)
    when = "" if since is None else f" since {format_time(since)}"
    note(f"the fleet is paused{when}; the requests wait for: {program()} resume{_options(nats_url, state.fleet)}")


def _others(workers: Sequence[WorkerPresence]) -> str:
    return FleetSnapshot(tuple(workers)).describe_others(None)


def _options(nats_url: str, fleet: str) -> str:
    """Return the options with which another command reaches the same fleet."""
    from ..app import DEFAULT_FLEET, DEFAULT_NATS

    nats = "" if nats_url == DEFAULT_NATS else f" --nats {without_password(nats_url)}"
    return nats + ("" if fleet == DEFAULT_FLEET else f" --fleet {fleet}")


INTERVAL_S: Final = 1.0
"""Seconds between two updates. Workers publish presence at the same interval."""
CHECK_S: Final = 10.0
"""Seconds between two probes of the queues."""


def print_state(state: FleetState) -> None:
    """Print the tables of a fleet on stdout."""
    write("\n".join(state_lines(state, shutil.get_terminal_size().columns)))


def state_lines(state: FleetState, width: int) -> list[str]:
    """Return the tables of a fleet that are not empty, with an empty line between them."""
    every = (
        (WORKER_COLUMNS, worker_rows(state.workers)),
        (PROBLEM_COLUMNS, problem_rows(state.queue_problems)),
        (STOP_COLUMNS, stop_rows(state.desired)),
        (TRANSFER_COLUMNS, transfer_rows(state.workers)),
        (QUEUE_COLUMNS, queue_rows(state.queues)),
        (DESIRED_COLUMNS, desired_rows(state.desired)),
        (PUBLISHED_COLUMNS, published_rows(state.workers)),
        (PREFIX_COLUMNS, prefix_rows(state.workers)),
        (ENGINE_COLUMNS, engine_rows(state.workers)),
    )
    return [line for columns, rows in every if rows for line in ("", *lay_out(columns, rows, width).lines)][1:]


async def _watch(rb: Client, args: argparse.Namespace) -> None:
    """Show the fleet every second until the user or the reader of the pipe ends it.

    On a terminal the tables change in place, and keys scroll them. Elsewhere they are printed again. If the server does
    not answer, show the error and continue.
    """
    from .terminal import is_capable, show_pages

    def lines_of(state: FleetState, width: int) -> list[str]:
        heading = f"fleet {state.fleet} at {time.strftime('%H:%M:%S')}"
        nothing = f"{no_workers(args.nats, args.fleet)}; {START_SOME}"
        return [heading, "", *(state_lines(state, width) if state.workers else [nothing])]

    if is_capable() and not args.json:
        await show_pages(_states(rb), lines_of)
        return
    async for state in _states(rb):
        if isinstance(state, BusBroken):
            note(f"rollbus: {state}")
        elif args.json:
            if not print_json(state_as_json(state)):
                return
        elif not write("\n".join(lines_of(state, shutil.get_terminal_size().columns)) + "\n"):
            return


async def _states(rb: Client) -> AsyncIterator[FleetState | BusBroken]:
    """Yield the state of the fleet each second, or the error if the server does not answer."""
    problems, checked_at = dict[str, str](), -math.inf
    while True:
        began = time.monotonic()
        try:
            if began - checked_at >= CHECK_S:
                checked_at, problems = began, await rb.fleet.check_queues()
            state = await rb.fleet.state()
            yield replace(state, queue_problems=problems | state.queue_problems)
        except BusBroken as exc:
            yield exc
        await asyncio.sleep(began + INTERVAL_S - time.monotonic())


async def run(args: argparse.Namespace) -> int:
    """Print the fleet's state, once or each second."""
    if args.watch:
        with contextlib.suppress(asyncio.CancelledError):  # only Ctrl-C cancels this task
            async with connect(args) as rb:
                await _watch(rb, args)
        return ExitCode.OK
    async with connect(args) as rb:
        state = await rb.fleet.state()
        state = replace(state, queue_problems=await rb.fleet.check_queues() | state.queue_problems)
    if args.json:
        print_json(state_as_json(state))
    elif state.workers:
        print_state(state)
    if not state.workers:
        raise bus.NoWorkers(message="no worker is live")
    return ExitCode.OK
