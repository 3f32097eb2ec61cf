"""The tables of docs/performance.md, from the result files of the benches.

    python -m bench transport routing real_engine latency control trainer
    python -m bench.paper

A table lies between `<!-- bench: NAME -->` and `<!-- end -->`, below its command and its machine.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollbus.frontend.cli.tables import Spread, cell

ROOT: Final = Path(__file__).resolve().parent.parent
DOC: Final = ROOT / "docs" / "performance.md"
RESULTS: Final = ROOT / "bench" / "results"
TABLE: Final = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str, results: Path) -> str:
    """Return the page with its tables regenerated.

    Raises:
        OSError: the result file of a bench is missing.
    """

    def fill(found: re.Match[str]) -> str:
        return found[1] + table(json.loads((results / f"{found[2]}.json").read_text())) + found[3]

    return TABLE.sub(fill, text)


def table(report: Mapping[str, Any]) -> str:
    """Return the results of one bench as Markdown."""
    rows = [{name: cell(spread_or_plain(value)) for name, value in row.items()} for row in report["rows"]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([row.get(name, "") for name in columns] for row in rows)]
    head = f"`{report['command']}`, {report['machine']}\n\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread_or_plain(value: Any) -> Any:
    """Return a value in the type that a report uses."""
    return Spread(**value) if isinstance(value, dict) else value


if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text(), RESULTS))
