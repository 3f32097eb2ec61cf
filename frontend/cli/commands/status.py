"""Show the live workers of the fleet: their state, desired state and capabilities, and the queues.

If no worker is live, the command exits with 5. With --watch, it continues even without workers, and Ctrl-C ends it with
exit code 0.
"""

import argparse

from ..exits import ExitCode
from ..options import START_SOME, no_workers

HELP = "show the workers of the fleet and their queues"
EXAMPLES = (
    "rollbus status",
    "rollbus status --watch",
    "rollbus status --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--watch", action="store_true", help="refresh each second until Ctrl-C; with --json one line per second"
    )


def run(args: argparse.Namespace) -> int:
    """Print the fleet's state, once or each second."""
    from ..app import run_async

    if not args.watch:
        return run_async(_print(args))
    try:
        return run_async(_watch(args))
    except KeyboardInterrupt:
        return ExitCode.OK


async def _print(args: argparse.Namespace) -> int:
    from msgspec.structs import replace

    from .... import bus
    from ..console import print_json
    from ..watch.status import print_state, state_as_json

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        state = await rb.fleet.state()
        state = replace(state, queue_problems=await rb.fleet.check_queues() | state.queue_problems)
    if args.json:
        print_json(state_as_json(state))
    elif state.workers:
        print_state(state)
    if not state.workers:
        raise bus.NoWorkers(message="no worker is live")
    return ExitCode.OK


async def _watch(args: argparse.Namespace) -> int:
    from .... import bus
    from ..watch.status import watch_state

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        await watch_state(rb, nothing=f"{no_workers(args.nats, args.fleet)}; {START_SOME}", as_json=args.json)
    return ExitCode.OK
