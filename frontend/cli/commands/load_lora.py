"""Load a LoRA adapter under a name for requests, or replace the adapter with that name.

PATH is the folder of the adapter, with adapter_config.json and adapter_model.safetensors. Each worker looks for it on
its own machine, below one of its --weight-root folders. With --upload the adapter goes to the workers through NATS.

If a load fails, the previous adapter stays loaded. Workers that start later load the new adapter too.
"""

import argparse

from msgspec.structs import astuple

from ....schemas.options import non_negative_int
from ..control import add_send_options, add_source_options, command, source_of

HELP = "load or replace a LoRA adapter"
EXAMPLES = (
    "rollbus load-lora sql loras/sql --upload",
    "rollbus load-lora sql /models/loras/sql --version 7",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("name", metavar="NAME", help="name of the adapter in requests")
    add_source_options(parser, "adapter")
    parser.add_argument(
        "--version", metavar="N", type=non_negative_int, help="version of the adapter (default: last version plus 1)"
    )
    add_send_options(parser)


async def run(args: argparse.Namespace) -> int:
    """Load the adapter."""
    path, objects = astuple(source_of(args))
    send = command(
        lambda args, fleet, options: fleet.load_lora(
            args.name, path, objects=objects, upload=args.upload, version=args.version, **options
        )
    )
    return await send(args)
