"""Show what keeps a step from ending: stops and their authors, locks, late workers, and requests without a token.

Each cause has the next command to run. The command reads the state of the fleet and asks the workers for their requests
in flight. Users that may not read requests see the other causes.
"""

import argparse
import shutil
import time
from typing import TYPE_CHECKING

from ..exits import CommandFailed, ExitCode
from ..options import START_SOME, no_workers

if TYPE_CHECKING:
    from ....bus import FleetState, RequestList


HELP = "show why requests do not end, and the next command to run"
EXAMPLES = (
    "rollbus why",
    "rollbus why --model my-model",
    "rollbus why --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="only requests for this model (default: for all)")


async def run(args: argparse.Namespace) -> int:
    """Read the fleet and print the causes."""
    from dataclasses import asdict

    from .... import bus
    from ....schemas.errors import ControlCode, ControlError, NoWorkers
    from ..console import print_json, write
    from ..tables import wrapped
    from ..watch.why import cause_lines, find_causes, of_model

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        state = await rb.fleet.state()
        running, unknown = None, ""
        if args.model is not None and state.workers:
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


def _summary(state: "FleetState", running: "RequestList | None", *, is_blocked: bool) -> list[str]:
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
