"""Measures another commit beside this one, and fails if a figure has become worse than its noise.

    python -m bench --compare COMMIT [transport ...] [--rounds 5] [-- OPTIONS OF THE BENCH]

The other commit is checked out into a temporary directory and runs with the packages of this environment. Both commits
run the bench in turns. A figure is worse if its best round is worse than the worst round of the other commit. The unit
at the end of its name decides what is better: more for `per_s` and `times`, less for times, CPU and bytes. Counts of
`instructions` are worse if they grew by more than 3 %. Figures with other units are shown only.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.report import ROOT
from rollbus.frontend.cli.tables import table_text

LESS = ("_ms", "_us", "_s", "_bytes", "_kb", "_mb")
COUNTS = {"instructions": 0.03, "c_calls": 0.05}
"""Figures of `bench.instructions`, each with its noise. The loops of a busy machine poll a little more often."""
Figures = dict[tuple[str, str], list[float]]
"""By row and column: the figure of each round."""


def is_worse(column: str, before: Sequence[float], after: Sequence[float]) -> bool:
    """Return True if the rounds after a change are all worse than those before it."""
    if column.endswith("_per_s") or column.startswith("times_"):
        return max(after) < min(before)
    if column in COUNTS:
        return median(after) > (1 + COUNTS[column]) * median(before)
    return column.endswith(LESS) and min(after) > max(before)


def measure(tree: Path, bench: str, options: Sequence[str], figures: Figures) -> None:
    """Run one round of a bench in a checkout, and add its figures."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", f"bench.{bench}", "--rounds", "1", "--json", file.name, *options]
        subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree / "src")}, stdout=sys.stderr, check=True
        )
        rows = json.loads(Path(file.name).read_text())["rows"]
    for row in rows:
        name = " ".join(str(value) for value in row.values() if not isinstance(value, dict))
        for column, value in row.items():
            if isinstance(value, dict):
                figures[name, column].append(value["median"])


def compare(commit: str, bench: str, rounds: int, options: Sequence[str]) -> int:
    """Measure both commits in turns and print the differences. Return 1 if a figure is worse."""
    old: Figures = defaultdict(list)
    new: Figures = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="rollbus-compare-") as directory:
        tree = Path(directory, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            for _ in range(rounds):
                measure(tree, bench, options, old)
                measure(ROOT, bench, options, new)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    lines = []
    for row, column in old.keys() & new.keys():
        before, after = old[row, column], new[row, column]
        ratio = median(after) / median(before) if median(before) else 1.0
        verdict = "worse" if is_worse(column, before, after) else ""
        lines.append([row, column, f"{median(before):.4g}", f"{median(after):.4g}", f"{ratio:.3f}", verdict])
    sys.stdout.write(table_text(["row", "figure", commit, "now", "now / then", "verdict"], sorted(lines)) + "\n")
    return int(any(line[-1] for line in lines))
