"""The tables of docs/performance.md, from what the benches have written.

    python -m bench transport routing real_engine latency control trainer
    python -m bench.paper

A table stands between `<!-- bench: NAME -->` and `<!-- end -->`, below the command and the machine that it is of.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.report import Spread, cell

__all__ = ["with_tables"]

ROOT: Final = Path(__file__).resolve().parent.parent
DOC: Final = ROOT / "docs" / "performance.md"
RESULTS: Final = ROOT / "bench" / "results"
TABLE: Final = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str, results: Path) -> str:
    """The page with its tables written anew.

    Raises:
        OSError: a bench has written nothing.
    """

    def fill(found: re.Match[str]) -> str:
        return found[1] + table(json.loads((results / f"{found[2]}.json").read_text())) + found[3]

    return TABLE.sub(fill, text)


def table(report: Mapping[str, Any]) -> str:
    """What one bench found, as Markdown."""
    rows = [{name: cell(spread_or_plain(value)) for name, value in row.items()} for row in report["rows"]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([row.get(name, "") for name in columns] for row in rows)]
    head = f"`{report['command']}`, {report['machine']}\n\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread_or_plain(value: Any) -> Any:
    """A value as a report has it."""
    return Spread(**value) if isinstance(value, dict) else value


if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text(), RESULTS))
