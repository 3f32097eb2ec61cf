"""Clear the desired state of workers: pause, weights and adapters. Use this if the state no longer fits the model.

Running workers keep their weights, undo a pause and unload adapters. Workers that start later use the weights of their
options.
"""

import argparse

from ..exits import ExitCode

HELP = "clear the desired state of workers"
EXAMPLES = (
    "rollbus reset",
    "rollbus reset --model my-model",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: every live model)")


async def run(args: argparse.Namespace) -> int:
    """Clear the desired state."""
    from .... import bus
    from ..console import print_json, write

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        models = await rb.fleet.reset(args.model)
    if args.json:
        print_json({"models": models})
    else:
        write(f"cleared the desired state of {', '.join(models)}" if models else "no desired state was recorded")
    return ExitCode.OK
