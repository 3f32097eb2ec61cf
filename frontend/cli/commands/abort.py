"""Abort requests in flight of any client. Their response streams end with the finish reason `abort`.

Requests that still wait in the queue are not aborted. The command reports each id that no worker has. A request may
have ended by itself, so the command fails only if no worker has any of the ids.
"""

import argparse

from ..control import add_send_options, command

HELP = "abort requests in flight"
EXAMPLES = (
    "rollbus abort req-1",
    "rollbus abort req-1 req-2 --worker w0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("request_ids", metavar="ID", nargs="+", help="id of a request, as set by its client")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.abort(args.request_ids, **options))
