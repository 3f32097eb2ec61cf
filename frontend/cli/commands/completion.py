"""Print a script that completes commands and options of `rollbus` in your shell."""

import argparse

from ..exits import ExitCode

HELP = "print the completion script of a shell"
EXAMPLES = (
    "rollbus completion bash    # into ~/.local/share/bash-completion/completions/rollbus",
    "rollbus completion zsh     # into _rollbus in a directory of $fpath",
    "rollbus completion fish    # into ~/.config/fish/completions/rollbus.fish",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from ..app import build_parser
    from ..console import write

    parser = build_parser()
    complete_files(parser)
    write(shtab.complete(parser, args.shell))
    return ExitCode.OK


def complete_files(parser: argparse.ArgumentParser) -> None:
    """Mark the options whose values are paths, so that the shell completes them."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                complete_files(command)
        elif isinstance(action.metavar, str) and ("FILE" in action.metavar or "DIR" in action.metavar):
            action.complete = shtab.DIRECTORY if "DIR" in action.metavar else shtab.FILE  # type: ignore[attr-defined]
