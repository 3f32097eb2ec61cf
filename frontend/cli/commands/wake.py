"""Undo `rollbus sleep`."""

from ..control import add_send_options, command

HELP = "undo sleep"
EXAMPLES = (
    "rollbus wake",
    "rollbus wake --worker w0",
)

add_arguments = add_send_options
run = command(lambda args, fleet, options: fleet.wake(**options))
