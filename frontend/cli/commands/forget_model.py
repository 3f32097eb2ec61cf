"""Forget a model that the fleet no longer serves: delete its queue and its desired state.

A client that names no model needs a fleet with exactly one known model. A model is known from its first worker, or from
`make-queue`, until this command. The command fails if a worker of the model lives, or if its queue has requests. On a
server with `rollbus auth` it needs the credentials of an admin. Published weights stay.
"""

import argparse

from ..exits import ExitCode

HELP = "forget a model without workers"
EXAMPLES = (
    "rollbus status",
    "rollbus forget-model old-model",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="name of the model")


async def run(args: argparse.Namespace) -> int:
    """Forget the model."""
    from .... import bus
    from ..console import print_json, write

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        was_known = await rb.fleet.forget_model(args.model)
    if args.json:
        print_json({"model": args.model, "was_known": was_known})
    else:
        write(f"forgot the model {args.model}" if was_known else f"the model {args.model} was not known")
    return ExitCode.OK
