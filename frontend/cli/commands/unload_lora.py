"""Unload a LoRA adapter; requests in flight that use it are ended. One that is not loaded is fine."""

import argparse

from ..control import add_send_options, command

__all__ = ["HELP", "add_arguments", "run"]

HELP = "unload a LoRA adapter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("name", metavar="NAME", help="what requests call it")
    add_send_options(parser)


run = command(lambda args, fleet, options: fleet.unload_lora(args.name, **options))
