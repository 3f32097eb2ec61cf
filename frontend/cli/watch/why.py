"""Finds what keeps requests from making tokens, from the state of a fleet and the requests in flight. No I/O."""

import argparse
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from ....bus import FleetState, RequestList
from ....bus.protocol.fleet.desired import list_stops, why_behind
from ....bus.protocol.fleet.presence import open_transfers, slots_of
from ....schemas.control import DesiredState
from ....schemas.errors import ControlCode, ControlError, NoWorkers
from ....schemas.presence import WorkerState
from ..console import print_json, write
from ..exits import CommandFailed, ExitCode
from ..options import START_SOME, check_known_model, connect, no_workers
from ..tables import printable, wrapped
from .status import of_model
from .traces import id_of, state_of

IDLE_S: Final = 5.0
"""Seconds without a token after which a request is named. Honest steps, also of long prompts, are mostly shorter."""
LATE_S: Final = 3.0
"""Age of a worker's presence above which it is late. Workers publish it every second."""
MAX_REQUESTS: Final = 8
"""Maximum number of requests that are named. With the other causes, they fit on one screen."""
_STOPPED: Final = frozenset({WorkerState.PAUSED, WorkerState.DRAINED, WorkerState.ASLEEP})
"""States that a command requires, so that the command is the cause."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why requests wait."""

    cause: str
    of: str
    """The model, worker or request."""
    seconds: float | None = None
    """Seconds since it began; None: not known."""
    by: str = ""
    """The client or user that caused it; empty: nobody did, or it is not known."""
    next: str = ""
    """The next command to run."""


def cause_lines(causes: list[Cause], width: int) -> Iterator[str]:
    """Yield lines for each cause: what it is, in at most `width` columns, and the next command as it is typed.

    Characters that could control the terminal are escaped: ids, authors and reasons come from other programs.
    """
    for each in causes:
        seconds = "" if each.seconds is None else f", for {each.seconds:,.0f} s"
        text = f"{each.of}: {each.cause}{seconds}{f', by {each.by}' if each.by else ''}"
        yield from wrapped(text, width)
        yield f"  -> {printable(each.next)}"


def find_causes(state: FleetState, running: RequestList | None, now: float) -> list[Cause]:
    """Return all causes, what stops the most requests first.

    Args:
        running: requests in flight, the longest time without a token first; None: this user may not read any.
        now: Unix time.
    """
    return [
        *_stops(state, now),
        *_transfers(state),
        *_workers(state, {} if running is None else running.silent),
        *_queues(state),
        *([] if running is None else _requests(running)),
    ]


def _stops(state: FleetState, now: float) -> Iterator[Cause]:
    for stop in list_stops(state.desired):
        undo = "rollbus wake" if stop.what == "asleep" else "rollbus resume"
        where = f"--model {shlex.quote(stop.model)}" if stop.worker is None else f"--worker {stop.worker}"
        name = stop.model if stop.worker is None else stop.worker
        seconds = None if stop.since is None else max(now - stop.since, 0.0)
        step = f"rollbus return {name}" if stop.what.startswith("lent") else f"{undo} {where}"
        yield Cause(stop.what, name, seconds, stop.by, step)


def _transfers(state: FleetState) -> Iterator[Cause]:
    for transfer, workers in open_transfers(state.workers).values():
        undo = f"rollbus cancel-transfer --transfer {shlex.quote(transfer.id)}"
        yield Cause("a transfer of weights is open", ", ".join(workers), transfer.age_s, transfer.by, undo)


def _workers(state: FleetState, silent: dict[str, str]) -> Iterator[Cause]:
    for worker in state.workers:
        desired = state.desired.get(worker.model, DesiredState(model=worker.model))
        why = None if worker.state in _STOPPED else why_behind(worker, desired)
        if why is not None:
            starts = worker.uptime_s if worker.state is WorkerState.STARTING else None
            yield Cause(why, worker.worker, starts, next="rollbus status")
        if worker.lease_age_s > LATE_S:
            yield Cause("its presence is late", worker.worker, worker.lease_age_s, next="rollbus doctor")
    for name, why in silent.items():
        yield Cause(f"no answer: {why}", name, next="rollbus doctor")


def _queues(state: FleetState) -> Iterator[Cause]:
    for model, problem in state.queue_problems.items():
        yield Cause(f"its queue does not answer: {problem}", model, next="rollbus doctor")
    for model in dict.fromkeys(depth.model for depth in state.queues):
        waiting = sum(depth.waiting for depth in state.queues if depth.model == model)
        serving = [each for each in state.workers if each.model == model and each.state is WorkerState.SERVING]
        wait = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
        if waiting and not serving:
            yield Cause(f"{wait}, and no worker serves", model, next="rollbus status")
        elif waiting:
            workers = "1 worker" if len(serving) == 1 else f"{len(serving)} workers"
            cause = f"{wait} for {sum(map(slots_of, serving)):,} slots of {workers}"
            yield Cause(cause, model, next=f"rollbus requests slowest --model {shlex.quote(model)}")


def _requests(running: RequestList) -> Iterator[Cause]:
    for timeline in running.timelines[:MAX_REQUESTS]:
        if timeline.progress is not None and timeline.progress.idle_s >= IDLE_S:
            cause = f"no token ({state_of(timeline)} at {timeline.worker})"
            trace = f"rollbus trace {shlex.quote(id_of(timeline))}"
            yield Cause(cause, id_of(timeline), timeline.progress.idle_s, timeline.client, trace)


async def run(args: argparse.Namespace) -> int:
    """Read the fleet and print the causes."""
    async with connect(args) as rb:
        state = await rb.fleet.state()
        running, unknown = None, ""
        if args.model is not None and state.workers:
            check_known_model(state, args.model)
            state = of_model(state, args.model)
        try:
            if state.workers or args.model is None:
                workers = None if args.model is None else [each.worker for each in state.workers]
                running = await rb.fleet.requests(model=args.model, workers=workers)
        except NoWorkers as exc:
            unknown = str(exc)
        except ControlError as exc:
            if exc.code is not ControlCode.NOT_ALLOWED:
                raise
            unknown = f"requests are not shown: {exc}"
    causes = find_causes(state, running, time.time())
    if args.json:
        print_json({"fleet": args.fleet, "causes": [asdict(cause) for cause in causes], "unknown": unknown})
    else:
        width = shutil.get_terminal_size().columns
        lines = [*_summary(state, running, is_blocked=bool(causes)), *([unknown] if unknown and state.workers else [])]
        parts = [part for line in lines for part in wrapped(line, width)]
        write("\n".join([*parts, *([""] if causes else []), *cause_lines(causes, width)]))
    if not state.workers:
        if args.model is None:
            raise NoWorkers(message="no worker is live")
        where = f"{no_workers(args.nats, args.fleet)} for model {args.model}"
        raise CommandFailed(f"{where}; {START_SOME}", ExitCode.NO_WORKERS)
    return ExitCode.OK


def _summary(state: FleetState, running: RequestList | None, *, is_blocked: bool) -> list[str]:
    serving = sum(worker.state == "serving" for worker in state.workers)
    in_flight, waiting = sum(worker.in_flight for worker in state.workers), sum(depth.waiting for depth in state.queues)
    requests = "1 request" if in_flight == 1 else f"{in_flight:,} requests"
    line = f"{serving} of {len(state.workers)} workers serve; {requests} in flight, {waiting:,} wait"
    if is_blocked or not state.workers:
        return [line]
    idle_s = (
        max((each.progress.idle_s for each in running.timelines if each.progress), default=None) if running else None
    )
    tokens = "" if idle_s is None else f" Each request has made a token in the last {idle_s:.1f} s."
    return [line, f"Nothing stops them.{tokens} If a step is slow: rollbus requests slowest"]
