"""Unload a LoRA adapter; requests in flight that use it are ended. One that is not loaded is fine."""

import argparse

from frontend.cli.control import add_send_options, run_control

__all__ = ["HELP", "add_arguments", "run"]

HELP = "unload a LoRA adapter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("name", metavar="NAME", help="what requests call it")
    add_send_options(parser)


def run(args: argparse.Namespace) -> int:
    """Unload."""
    return run_control(args, lambda fleet, options: fleet.unload_lora(args.name, **options))
