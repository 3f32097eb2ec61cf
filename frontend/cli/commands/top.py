"""Show the fleet in the terminal and update it: workers with their rates, queues, desired state and commands.

The command reads the presence that workers publish every second. It needs no HTTP service and sends no requests to
workers. Keys: q quits, s changes the order, p selects the next model, arrows and page keys scroll. If stdout is not a
terminal, the command prints the tables once. If it prints once and no worker is live, it exits with 5. Every role may
use the command. It omits data that the user may not read.
"""

import argparse

from ....schemas.options import duration
from ..exits import ExitCode
from ..options import refuse_options
from ..watch.top import SORTS

HELP = "watch the fleet in the terminal, with its rates"
EXAMPLES = (
    "rollbus top",
    "rollbus top --sort tokens --interval 5",
    "rollbus top --once",
    "rollbus top --json",
)
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--interval", metavar="TIME", type=_interval, default=1.0, help="seconds between refreshes (default: 1)"
    )
    parser.add_argument(
        "--sort", choices=SORTS, default="state", help="initial order of the workers (default: state, the worst first)"
    )
    parser.add_argument("--model", metavar="NAME", help="show the workers of one model (default: all)")
    parser.add_argument("--once", action="store_true", help="print the tables once (implied by --json)")


def _interval(text: str) -> float:
    seconds = duration(text)
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}")
    return seconds


async def run(args: argparse.Namespace) -> int:
    """Show the fleet until the user quits, or print it once."""
    from .... import bus
    from ..console import print_json
    from ..watch.terminal import is_capable, read_view, run_top
    from ..watch.top import TopOptions, print_top, top_as_json

    if args.once or args.json:
        refuse_options(args, ["interval"], "with --once or --json")
    options = TopOptions(sort=args.sort, model=args.model)
    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        if is_capable() and not (args.once or args.json):
            await run_top(rb, options, args.interval)
            return ExitCode.OK
        view = await read_view(rb)
    if args.json:
        print_json(top_as_json(view, options))
    elif view.state.workers:
        print_top(view, options)
    if not view.state.workers:
        raise bus.NoWorkers(message="no worker is live")
    return ExitCode.OK
