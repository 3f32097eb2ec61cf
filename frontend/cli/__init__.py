"""The `rollbus` command line: `frontend/cli/commands` declares the subcommands."""

from .app import main as main
