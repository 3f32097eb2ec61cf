"""Make the queues of models, and the bucket of what workers are told, on a server where only admins may.

Workers of a server without `rollbus auth` make them by themselves. What is there already stays as it is, with all that
waits in it.
"""

import argparse

from frontend.cli.exits import ExitCode

__all__ = ["HELP", "add_arguments", "run"]

HELP = "make a model's queue, where workers may not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("models", metavar="MODEL", nargs="+", help="served name of a model")


def run(args: argparse.Namespace) -> int:
    """Make them."""
    from bus.provision import provision
    from bus.server import Server
    from frontend.cli.app import run_async
    from frontend.cli.console import print_json, say

    async def make() -> int:
        await provision(Server.named(args.nats), args.fleet, args.models)
        return ExitCode.OK

    run_async(make())
    if args.json:
        print_json({"models": args.models})
    else:
        say(f"the queue of {', '.join(args.models)} is there")
    return ExitCode.OK
