"""The tables of docs/performance.md, from the result files of the benches.

    python -m bench transport routing real_engine latency control trainer
    python -m bench.paper

A table lies between `<!-- bench: NAME COLUMN... -->` and `<!-- end -->`, below its command and its machine. It has the
medians of these columns. `COLUMN=VALUE` selects the rows with this value, and `COLUMN=*` those with any value.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollbus.frontend.cli.tables import cell

ROOT: Final = Path(__file__).resolve().parent.parent
DOC: Final = ROOT / "docs" / "performance.md"
RESULTS: Final = ROOT / "bench" / "results"
TABLE: Final = re.compile(r"(<!-- bench: (\w+) ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str, results: Path) -> str:
    """Return the page with its tables regenerated.

    Raises:
        OSError: the result file of a bench is missing.
    """

    def fill(found: re.Match[str]) -> str:
        report = json.loads((results / f"{found[2]}.json").read_text())
        return found[1] + table(report, found[3].split()) + found[4]

    return TABLE.sub(fill, text)


def table(report: Mapping[str, Any], chosen: Sequence[str]) -> str:
    """Return the chosen columns and rows of one bench as Markdown."""
    columns = [name for name in chosen if "=" not in name]
    conditions = dict(name.split("=") for name in chosen if "=" in name)
    rows = [{name: cell(median(value)) for name, value in row.items()} for row in report["rows"]]
    kept = [row for row in rows if is_selected(row, conditions)]
    lines = [[row.get(name, "") for name in columns] for row in kept]
    return f"`{report['command']}`, {report['machine']}\n\n{markdown(columns, lines)}\n"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *lines))
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def is_selected(row: Mapping[str, str], conditions: Mapping[str, str]) -> bool:
    """Return True if the row has each column of the conditions, with its value unless that is `*`."""
    return all(name in row and value in {"*", row[name]} for name, value in conditions.items())


def median(value: Any) -> Any:
    """Return the median of a spread, and any other value as it is."""
    return value["median"] if isinstance(value, dict) else value


if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text(), RESULTS))
