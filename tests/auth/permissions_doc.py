"""Write the tables of permissions in docs/operate/secure.md: `python -m tests.auth.permissions_doc`."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollbus.bus.auth.credentials import Role
from rollbus.bus.auth.permissions import JETSTREAM_RULES, SUBJECT_RULES

DOC = Path(__file__).parents[2] / "docs" / "operate" / "secure.md"
PARTS = re.compile(r"(<!-- table: (permissions|jetstream) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_table(text: str) -> str:
    """Return the document with the tables that the code defines now."""
    tables = {"permissions": _subjects, "jetstream": _jetstream}
    return PARTS.sub(lambda match: f"{match[1]}{tables[match[2]]()}{match[3]}", text)


def _subjects() -> str:
    rows = (
        (f"`{rule.subject}`", _names(rule.publish), _names(rule.subscribe), _names(rule.observe))
        for rule in SUBJECT_RULES
    )
    return _table(("subject below `rb.v1.<fleet>.`", "publish", "subscribe", "subscribe for all names"), rows)


def _jetstream() -> str:
    rows = ((f"`{rule.subject}`", _names(rule.publish), _names(rule.subscribe), rule.why) for rule in JETSTREAM_RULES)
    return _table(("subject", "publish", "subscribe", "for"), rows)


def _names(roles: frozenset[Role]) -> str:
    if roles == frozenset(Role):
        return "all"
    return ", ".join(role for role in Role if role in roles) or "–"


def _table(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in which subjects with the same cells share a row."""
    subjects: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for subject, *cells in rows:
        subjects[tuple(cells)].append(subject)
    lines = [columns, ("---",) * len(columns), *((", ".join(names), *cells) for cells, names in subjects.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    DOC.write_text(with_table(DOC.read_text()))
