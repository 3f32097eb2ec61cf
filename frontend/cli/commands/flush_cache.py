"""Make workers forget their prefix caches.

While requests are in flight, an engine may not be able to: then its worker fails, and says so. With --preempt the
requests in flight give up what they have cached, and are computed anew.

After an update of the weights nothing need be flushed: new requests never find what older weights have cached.
"""

import argparse

from ..control import add_send_options, command

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "forget prefix caches"
EXAMPLES = (
    "rollbus flush-cache",
    "rollbus flush-cache --preempt --worker w0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--preempt", action="store_true", help="also what requests in flight have cached")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.flush_cache(preempt=args.preempt, **options))
