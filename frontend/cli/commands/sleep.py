"""Release the memory of engines until `rollbus wake`. Requests wait in the queue or go to other workers."""

import argparse

from ..control import add_send_options, command

HELP = "release the memory of engines"
EXAMPLES = (
    "rollbus sleep",
    "rollbus sleep --level 2 --worker w0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="1: keep the weights in the memory of the machine; 2: discard and reload them on wake (default: 1)",
    )
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.sleep(level=args.level, **options))
