"""What every bench says, in one form: its command, the machine, a table, and JSON for who goes on with the figures.

A bench measures in rounds, and what it compares takes turns within a round: whatever slows the machine down slows all
of them. A figure is the median of the rounds, with their range.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from frontend.cli.console import plain_table
from frontend.cli.figures import Spread, digits, percentile

__all__ = ["Report", "Spread", "Value", "add_arguments", "percentile"]

ROUNDS = 5


Value = Spread | float | int | str
"""What stands in a cell."""


@dataclass(slots=True)
class Report:
    """The rows of one bench, as they come.

    Args:
        bench: name of its module, as in `python -m bench.transport`.
    """

    bench: str
    rows: list[Mapping[str, Value]] = field(default_factory=list)

    def add(self, **row: Value) -> None:
        """Add a row; its names are the columns, unit last: `tokens_per_s`, `p99_ms`. Says it on stderr as well."""
        self.rows.append(row)
        sys.stderr.write("  ".join(f"{name} {cell(value)}" for name, value in row.items()) + "\n")

    def finish(self, json_file: Path | None) -> None:
        """Print command, machine and table on stdout; write all of it to `json_file` as JSON."""
        head = {"command": " ".join(["python -m", f"bench.{self.bench}", *sys.argv[1:]]), "machine": machine()}
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [[cell(row[name]) if name in row else "" for name in columns] for row in self.rows]
        sys.stdout.write(f"{head['command']}\n{head['machine']}\n{plain_table(columns, lines)}\n")
        if json_file is not None:
            rows = [{name: as_json(value) for name, value in row.items()} for row in self.rows]
            json_file.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = ROUNDS) -> None:
    """Add what all benches take: `--rounds` and `--json`."""
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of what is compared (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")


def cell(value: Value) -> str:
    """A value as text, with as many digits as it is worth."""
    if isinstance(value, Spread):
        return value.text()
    if isinstance(value, float):
        return f"{value:,.{digits(value)}f}"
    return f"{value:,}" if isinstance(value, int) else value


def as_json(value: Value) -> object:
    """A value as JSON has it: a spread is an object."""
    return asdict(value) if isinstance(value, Spread) else value


def machine() -> str:
    """What the figures were measured on, and of which commit."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    commit = asked.stdout.strip() or "no commit"
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {commit}"
