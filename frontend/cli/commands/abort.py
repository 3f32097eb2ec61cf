"""Abort requests in flight of any client. Their streams end with `abort`.

Requests that still wait in the queue are not aborted. The command reports each id that no worker has. It fails only if
no worker has any of the ids, because a request may have ended by itself.
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
    parser.add_argument("request_ids", metavar="ID", nargs="+", help="id of a request, as set by its client")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.abort(args.request_ids, **options))
