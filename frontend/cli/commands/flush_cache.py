"""Reset the prefix caches of workers.

An engine may be unable to reset its cache while requests are in flight; the worker then reports a failure. With
--preempt, requests in flight lose their cached tokens, and the engine computes them again. A flush is not necessary
after an update of the weights: new requests never use the cache of older weights.
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
    parser.add_argument("--preempt", action="store_true", help="also reset cached tokens of requests in flight")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.flush_cache(preempt=args.preempt, **options))
