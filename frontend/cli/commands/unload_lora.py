"""Unload a LoRA adapter and abort the requests in flight that use it.

The command fails if no worker has the adapter or should have it.
"""

import argparse

from ..control import add_send_options, command

HELP = "unload a LoRA adapter"
EXAMPLES = (
    "rollbus unload-lora sql",
    "rollbus unload-lora sql --worker w0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("name", metavar="NAME", help="name of the adapter in requests")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.unload_lora(args.name, **options))
