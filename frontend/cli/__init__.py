"""The `rollbus` command line: one file in `frontend/cli/commands` for each subcommand."""

from .app import main as main
