"""Undo `rollbus pause` and `rollbus drain`: workers accept requests again, and paused requests continue.

A worker whose weight update failed does not resume. `rollbus status` shows its error.
"""

from ..control import add_send_options, command

HELP = "undo pause and drain"
EXAMPLES = (
    "rollbus resume",
    "rollbus resume --worker w0",
)

add_arguments = add_send_options
run = command(lambda args, fleet, options: fleet.resume(**options))
