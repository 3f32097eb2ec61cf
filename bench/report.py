"""Prints the result of every bench in the same form: command, machine, a table, and JSON for other programs.

A bench measures in rounds. The ways that it compares take turns within a round, so that a slow phase of the machine
affects all of them. A figure is the median of the rounds, with their range.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollbus.frontend.cli.tables import Value, as_json, cell, machine, table_text

ROUNDS = 5
ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Report:
    """The rows of one bench, in the order in which they are measured.

    Args:
        bench: name of the module, as in `python -m bench.transport`.
    """

    bench: str
    rows: list[Mapping[str, Value]] = field(default_factory=list)

    def add(self, **row: Value) -> None:
        """Add a row and write it to stderr. Its names are the columns, with the unit last: `tokens_per_s`, `p99_ms`."""
        self.rows.append(row)
        sys.stderr.write("  ".join(f"{name} {cell(value)}" for name, value in row.items()) + "\n")

    def finish(self, json_file: Path | None) -> None:
        """Print command, machine and table on stdout. Write the same data to `json_file` as JSON."""
        head = {
            "command": " ".join(["python -m", f"bench.{self.bench}", *map(shown_argument, sys.argv[1:])]),
            "machine": f"{machine()}, {commit()}",
        }
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [[cell(row[name]) if name in row else "" for name in columns] for row in self.rows]
        sys.stdout.write(f"{head['command']}\n{head['machine']}\n{table_text(columns, lines)}\n")
        if json_file is not None:
            rows = [{name: as_json(value) for name, value in row.items()} for row in self.rows]
            json_file.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = ROUNDS) -> None:
    """Add the options of all benches: `--rounds` and `--json`."""
    parser.add_argument("--rounds", type=int, default=rounds, help="number of rounds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="JSON file for the figures (default: no file)")


def shown_argument(argument: str) -> str:
    """Return an argument of the command without the folders of this machine.

    A path inside the checkout becomes relative to it. Of any other absolute path, only the name remains, below `DIR`.
    """
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path("DIR", path.name)
    return f"{option}{equals}{shown}"


def commit() -> str:
    """Return the commit that is measured."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "no commit"
