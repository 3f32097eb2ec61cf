"""Reset the prefix caches of workers.

If an engine cannot reset its cache while requests are in flight, the worker reports a failure. With --preempt, requests
in flight lose their cached tokens, and the engine computes them again. After an update of the weights, a reset is not
necessary: new requests never use the cache of older weights.
"""

import argparse

from ..control import add_send_options, command

HELP = "reset prefix caches"
EXAMPLES = (
    "rollbus flush-cache",
    "rollbus flush-cache --preempt --worker w0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--preempt", action="store_true", help="also reset cached tokens of requests in flight")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.flush_cache(preempt=args.preempt, **options))
