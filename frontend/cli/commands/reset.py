"""Forget what workers were told: pause, weights, adapters. For when that does not fit the model any more.

Workers that run keep the weights that they have; a pause and adapters are undone. Those that start afterwards begin
with the weights of their own options.
"""

import argparse

from ..exits import ExitCode

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "forget what workers were told to do"
EXAMPLES = (
    "rollbus reset",
    "rollbus reset --model my-model",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="of the workers of this model (default: of every live model)")


async def run(args: argparse.Namespace) -> int:
    """Forget."""
    from .... import bus
    from ..console import print_json, write

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        models = await rb.fleet.reset(args.model)
    if args.json:
        print_json({"models": models})
    else:
        write(f"forgot what was told the workers of {', '.join(models)}" if models else "nothing was recorded")
    return ExitCode.OK
