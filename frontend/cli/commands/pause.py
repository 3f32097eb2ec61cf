"""Pause workers: they take no more requests, which wait in the queue until `rollbus resume`.

With --mode keep, requests in flight stop where they are and go on after the resume, without a lost or repeated token.
With wait, they are finished first; if that takes longer than --timeout-s the command fails, and the workers stay
paused. With abort, they end at once with the tokens that they have.

A worker that starts later is paused too, unless --worker was given.
"""

import argparse
from typing import get_args

from ....schemas.control import PauseMode
from ..control import add_send_options, command

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "take no more requests; they wait in the queue"
EXAMPLES = (
    "rollbus pause",
    "rollbus pause --mode wait --timeout-s 600",
    "rollbus pause --worker w0 --clear-cache",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--mode", choices=get_args(PauseMode), default="keep", help="what becomes of requests in flight (default: keep)"
    )
    parser.add_argument("--clear-cache", action="store_true", help="forget the prefix cache too")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.pause(mode=args.mode, clear_cache=args.clear_cache, **options))
