"""The subcommands: each module is one, named after it, and has `HELP`, `add_arguments` and `run`."""
