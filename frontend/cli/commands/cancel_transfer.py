"""End an open transfer of weights, whoever opened it. The workers load the desired weights again.

`rollbus status` lists open transfers with their owners. A transfer whose owner is gone ends by itself.
"""

import argparse

from ..control import add_send_options, command

HELP = "end an open transfer of weights"
EXAMPLES = (
    "rollbus cancel-transfer",
    "rollbus cancel-transfer --worker w0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--transfer", metavar="ID", help="only the transfer with this id (default: whichever is open)")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.cancel_weight_update(transfer=args.transfer, **options))
