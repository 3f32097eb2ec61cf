"""Undo `rollbus sleep`."""

from ..control import add_send_options, command

__all__ = ["HELP", "add_arguments", "run"]

HELP = "undo sleep"

add_arguments = add_send_options
run = command(lambda args, fleet, options: fleet.wake(**options))
