"""Load a LoRA adapter under a name that requests use, or replace the one of that name.

PATH is the folder of the adapter: adapter_config.json and adapter_model.safetensors. Each worker looks for it on its
own machine, below one of its --weight-root; with --upload it goes to the workers through NATS.

A load that fails leaves the adapter of before. Workers that start later load it too.
"""

import argparse

from msgspec.structs import astuple

from ..arguments import non_negative_int
from ..control import add_send_options, add_source_options, command, source_of

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "load or replace a LoRA adapter"
EXAMPLES = (
    "rollbus load-lora sql loras/sql --upload",
    "rollbus load-lora sql /models/loras/sql --version 7",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("name", metavar="NAME", help="what requests call it")
    add_source_options(parser, "adapter")
    parser.add_argument(
        "--version", metavar="N", type=non_negative_int, help="of the adapter (default: one more than the last)"
    )
    add_send_options(parser)


async def run(args: argparse.Namespace) -> int:
    """Load."""
    path, objects = astuple(source_of(args))
    send = command(
        lambda args, fleet, options: fleet.load_lora(
            args.name, path, objects=objects, upload=args.upload, version=args.version, **options
        )
    )
    return await send(args)
