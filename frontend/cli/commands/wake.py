"""Undo `rollbus sleep`."""

import argparse

from frontend.cli.control import add_send_options, run_control

__all__ = ["HELP", "add_arguments", "run"]

HELP = "undo sleep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_send_options(parser)


def run(args: argparse.Namespace) -> int:
    """Wake."""
    return run_control(args, lambda fleet, options: fleet.wake(**options))
