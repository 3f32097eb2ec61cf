"""The documents say what the code says."""

import re
from pathlib import Path

import bus.subjects
from schemas.presence import WorkerState

ROOT = Path(__file__).parent.parent


def test_every_subject_is_documented() -> None:
    """The table of docs/protocol.md is the one in bus/subjects.py, row for row."""
    documented = (ROOT / "docs" / "protocol.md").read_text()
    rows = [line for line in (bus.subjects.__doc__ or "").splitlines() if line.startswith("| `")]

    assert len(rows) == 5
    assert [row for row in rows if row not in documented] == []


def test_every_worker_state_is_documented() -> None:
    """docs/protocol.md explains each state that a worker announces, and no other."""
    section = (ROOT / "docs" / "protocol.md").read_text().partition("## Presence")[2].partition("\n## ")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(WorkerState) - {WorkerState.UNKNOWN}
