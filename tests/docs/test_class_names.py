"""A class name has one meaning in the whole project."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bus", "frontend", "integrations", "schemas", "trainer", "workers")


def test_no_class_name_occurs_twice() -> None:
    """No two classes of the packages have the same name, apart from leading underscores."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert {name: found for name, found in places.items() if len(found) > 1} == {}
