"""Pause workers: they pull no requests until `rollbus resume`, and new requests wait in the queue.

With --mode keep, requests in flight stop and continue after the resume; no token is lost or repeated. With wait,
requests in flight finish first. If that takes longer than --timeout-s, the command fails and the workers stay paused.
With abort, requests in flight end immediately with the tokens that they have.

Workers that start later are paused too, unless --worker is set.
"""

import argparse
from typing import get_args

from ....schemas.control import PauseMode
from ..control import add_send_options, command

HELP = "pause workers; new requests wait in the queue"
EXAMPLES = (
    "rollbus pause",
    "rollbus pause --mode wait --timeout-s 600",
    "rollbus pause --worker w0 --clear-cache",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--mode", choices=get_args(PauseMode), default="keep", help="treatment of requests in flight (default: keep)"
    )
    parser.add_argument("--clear-cache", action="store_true", help="also reset the prefix cache")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.pause(mode=args.mode, clear_cache=args.clear_cache, **options))
