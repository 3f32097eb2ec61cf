"""All examples have the same form, and the documentation links to each."""

import ast
from pathlib import Path

import pytest

from tests.support.processes import FOLDERS, ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_import_rollbus_modules_by_their_full_names(path: Path) -> None:
    """An example imports only full names of rollbus and no other example.

    Users copy an example alone, possibly beside files with the names of rollbus folders.
    """
    forbidden = {*FOLDERS, "examples", *(each.stem for each in EXAMPLES)}
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])

    assert imported & forbidden == set()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_each_example_has_a_link(path: Path) -> None:
    """The README or a page of the documentation links to each example."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    assert any(f"examples/{path.name})" in page.read_text() for page in pages)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_number_of_steps_below_one_is_rejected(path: Path) -> None:
    """Each example with `--steps` rejects a number below 1."""
    source = path.read_text()

    assert ('"--steps"' in source) == ("is not 1 or more" in source)
