"""Prints the result of every bench in the same form: command, machine, a table, and JSON for other programs.

A bench measures in rounds. The ways that it compares take turns within a round, so that a slow phase of the machine
affects all of them. A figure is the median of the rounds, with their range.

CPU time of processes has the resolution of the kernel, because `psutil` has only hundredths of a second. Memory is
that which Linux reports.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rollbus.frontend.cli.tables import Value, as_json, cell, in_turns, machine, table_text
from rollbus.schemas.options import Option, add_options

K = TypeVar("K")
ROUNDS = 5
ROOT = Path(__file__).resolve().parent.parent
TINY_MOE = Path.home() / ".cache" / "rollbus" / "bench-tiny-moe"
"""Model of the benches with a real engine."""


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


def program(
    bench: str,
    description: str,
    run: Callable[[argparse.Namespace, Report], object],
    *options: Option,
    rounds: int = ROUNDS,
) -> None:
    """Run a bench as a program: parse the command line, measure with `run`, and print the report."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{bench}", description=description)
    parser.set_defaults(fail=parser.error)
    add_options(parser, options)
    parser.add_argument("--rounds", type=int, default=rounds, help="number of rounds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="JSON file for the figures (default: no file)")
    args = parser.parse_args()
    report = Report(bench)
    run(args, report)
    report.finish(args.json)


async def take_turns(
    rounds: int, ways: Iterable[K], measure: Callable[[K], Awaitable[dict[str, float]]]
) -> dict[K, list[dict[str, float]]]:
    """Measure every way once in each round. Return the figures of each round by way."""
    found: dict[K, list[dict[str, float]]] = {way: [] for way in ways}
    for way in in_turns(rounds, found):
        found[way].append(await measure(way))
    return found


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


_libc = ctypes.CDLL(None)


def cpu_s(pid: int) -> float:
    """Return the seconds, user and system, that all threads of a process have used so far.

    Raises:
        OSError: there is no such process.
    """
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, f"{os.strerror(error)}: process {pid}")
    return time.clock_gettime(clock.value)


def reset_peak(process: int | str = "self") -> None:
    """Set the peak size to the present size."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def resident_bytes(process: int | str = "self") -> int:
    """Return the present size of the process."""
    return _status_bytes(process, "VmRSS")


def peak_bytes(process: int | str = "self") -> int:
    """Return the peak size of the process since its start or the last `reset_peak`."""
    return _status_bytes(process, "VmHWM")


def give_back() -> None:
    """Return the freed memory of this process to the system. A later allocation would otherwise not show as growth."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(process: int | str, field: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/{process}/status has no {field}")


Load = tuple[int, int]
"""Number of requests at once, and tokens of each request."""


def parse_loads(texts: Sequence[str]) -> list[Load]:
    """Parse the loads of a command line."""
    return [(int(text.split("x")[0]), int(text.split("x")[1])) for text in texts]
