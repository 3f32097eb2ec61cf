"""Drain workers: their requests in flight move to other workers, and they accept no requests until `rollbus resume`.

The other workers resume the requests from the tokens that the clients have. A drained worker can be stopped without
loss.
"""

import argparse
from typing import TYPE_CHECKING, cast

from ..control import add_send_options, command

if TYPE_CHECKING:
    from ....bus.client.fleet import DrainOptions


HELP = "move all requests away from workers"
EXAMPLES = (
    "rollbus drain w0",
    "rollbus drain w0 w1 --timeout-s 120",
    "rollbus resume --worker w0    # put w0 back into service",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("workers", metavar="WORKER", nargs="+", help="id of a worker, as in `rollbus status`")
    add_send_options(parser, has_worker=False)


run = command(lambda args, fleet, options: fleet.drain(args.workers, **cast("DrainOptions", options)))
