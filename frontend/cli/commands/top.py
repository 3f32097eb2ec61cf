"""Show the fleet in the terminal, and keep it up to date: workers with their rates, queues, and what was told.

Workers announce themselves each second, and that is all it needs: no HTTP service, and nothing is asked of workers.
Keys: q ends, s changes the order, p shows one model after the other, the arrows and page keys scroll. If stdout is no
terminal, it prints the tables once. Exits with 5 when it prints once and no worker answers. Any role may use it; what
its user may not read is left out.
"""

import argparse

from ..arguments import positive_float, without_password
from ..exits import CommandFailed, ExitCode
from ..top.options import SORTS

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

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
    parser.add_argument("--interval", metavar="S", type=_interval, default=1.0, help="seconds between looks (1)")
    parser.add_argument("--sort", choices=SORTS, default="worker", help="order of the workers at first (worker)")
    parser.add_argument("--model", metavar="NAME", help="show the workers of one model (default: all)")
    parser.add_argument("--once", action="store_true", help="print the tables once; --json does so in any case")


def _interval(text: str) -> float:
    seconds = positive_float(text)
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}")
    return seconds


async def run(args: argparse.Namespace) -> int:
    """Show the fleet until the user has had enough, or print it once."""
    from .... import bus
    from ..console import print_json
    from ..top.full_screen import is_capable
    from ..top.options import TopOptions
    from ..top.plain import print_top, top_as_json
    from ..top.top import look_once, run_top

    options = TopOptions(sort=args.sort, model=args.model)
    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        if is_capable() and not (args.once or args.json):
            await run_top(rb, options, args.interval)
            return ExitCode.OK
        view = await look_once(rb)
    if args.json:
        print_json(top_as_json(view))
    elif view.state.workers:
        print_top(view, options)
    if not view.state.workers:
        raise CommandFailed(
            f"no live workers in fleet {args.fleet!r} at {without_password(args.nats)}; "
            "start some with `rollbus up` or `rollbus worker`",
            ExitCode.NO_WORKERS,
        )
    return ExitCode.OK
