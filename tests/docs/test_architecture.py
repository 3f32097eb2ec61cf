"""docs/architecture.md names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_exists() -> None:
    """Each path to a Python file, written from the root of the repository, exists."""
    named = re.findall(
        r"`((?:bus|frontend|schemas|trainer|workers)/[\w/]+\.py)`", (ROOT / "docs/architecture.md").read_text()
    )

    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).is_file()] == []
