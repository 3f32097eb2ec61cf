"""The subcommands. Each module is one subcommand, named after it, with `HELP`, `add_arguments` and `run`."""
