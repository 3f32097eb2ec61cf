"""Undo `rollbus pause` and `rollbus drain`: workers take requests again, and those that were kept go on.

A worker whose weights could not be updated stays as it is; see `rollbus status`.
"""

import argparse

from frontend.cli.control import add_send_options, run_control

__all__ = ["HELP", "add_arguments", "run"]

HELP = "undo pause and drain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_send_options(parser)


def run(args: argparse.Namespace) -> int:
    """Resume."""
    return run_control(args, lambda fleet, options: fleet.resume(**options))
