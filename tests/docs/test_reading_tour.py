"""The reading tour of docs/architecture.md names code that exists, and its minutes suffice."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"`([\w/]+\.py)` \(([^)]+)\)")
LINES_PER_MINUTE = 30
MINUTES = 40


def lines_of(path: str, name: str) -> int:
    """Return the number of lines of the functions, classes or assignments with a name in a file."""
    found = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets))
    ]
    assert found, f"{path} has no {name}"
    return sum(found)


def test_the_tour_fits_its_minutes() -> None:
    """Each stop has a minute for thirty lines of the named code and one for its question, in forty minutes in all."""
    _, _, tour = (ROOT / "docs" / "architecture.md").read_text().partition("## A reading tour of forty minutes")
    rows = [line.split(" | ") for line in tour.splitlines() if re.match(r"\| \d+ \|", line)]
    minutes = [int(row[1]) for row in rows]

    for number, row in enumerate(rows, 1):
        lines = sum(lines_of(path, name) for path, names in FILE.findall(row[2]) for name in re.findall(r"\w+", names))
        assert (row[0], len(row)) == (f"| {number}", 5)
        assert 0 < lines <= LINES_PER_MINUTE * (minutes[number - 1] - 1)
        assert f"\n{number}. " in tour, f"no answer to question {number}"
    assert MINUTES - 5 <= sum(minutes) <= MINUTES
