"""All examples have the same form, and the documentation links to each."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.one_name import FOLDERS, ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OTHERS = ("plain_control.py", "plain_nats.py", "rl_loop.py")
"""Examples without rollbus, for programs in other languages, and an example that starts its own fleet."""
MAX_LINES = 119
MAX_CODE_LINES_OF_GRPO = 80


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the line numbers of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


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
            assert node.module is not None
            imported.add(node.module.split(".")[0])

    assert imported & forbidden == set()


@pytest.mark.parametrize("path", [each for each in EXAMPLES if each.name not in OTHERS], ids=lambda path: path.name)
def test_examples_are_short_and_have_the_commands_to_run_them(path: Path) -> None:
    """An example is short, and its docstring has the commands that start the fleet and run it; it accepts `--steps`."""
    text = path.read_text()

    assert text.count("\n") <= MAX_LINES
    header = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"^Run it ", header, re.MULTILINE)
    assert re.search(r"^    rollbus up\b", header, re.MULTILINE)
    assert re.search(rf"^    python {path.name}\b", header, re.MULTILINE)
    assert '"--steps"' in text


def test_grpo_has_eighty_lines() -> None:
    """The GRPO example has at most eighty lines of code without blank lines, comments and docstrings."""
    text = (ROOT / "examples" / "grpo.py").read_text()
    prose = docstring_lines(ast.parse(text))
    code = [line for number, line in enumerate(text.splitlines(), 1) if number not in prose and line.strip()]

    assert len([line for line in code if not line.strip().startswith("#")]) <= MAX_CODE_LINES_OF_GRPO


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_each_example_has_a_link(path: Path) -> None:
    """The README or a page of the documentation links to each example."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    assert any(f"examples/{path.name})" in page.read_text() for page in pages)
