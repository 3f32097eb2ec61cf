"""End requests that are in flight at a worker, of whichever client; their streams end with `abort`.

Requests that still wait in the queue are not reached. An id that no worker has is reported, and no error, as the
request may have ended by itself, unless none of them was found.
"""

import argparse

from ..control import add_send_options, command

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "end requests in flight"
EXAMPLES = (
    "rollbus abort req-1",
    "rollbus abort req-1 req-2 --worker w0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("request_ids", metavar="ID", nargs="+", help="of a request, as its client named it")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.abort(args.request_ids, **options))
