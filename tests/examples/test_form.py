"""The form that all examples share: a reader of one knows the others. Each example has its place in the docs."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.one_name import FOLDERS, ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OTHERS = ("plain_control.py", "plain_nats.py", "rl_loop.py")
"""Without rollbus, for programs in other languages; and one that starts all that it needs."""
MAX_LINES = 119
MAX_CODE_LINES_OF_GRPO = 80


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_import_our_modules_by_their_full_names(path: Path) -> None:
    """And share nothing with each other: each is copied alone, beside files that are called as our folders are."""
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
def test_examples_are_short_and_say_how_to_run_them(path: Path) -> None:
    """What it shows, then two commands; each has `--steps`, with 1 as the least."""
    text = path.read_text()

    assert text.count("\n") <= MAX_LINES
    header = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"^Run it ", header, re.MULTILINE)
    assert re.search(r"^    rollbus up\b", header, re.MULTILINE)
    assert re.search(rf"^    python {path.name}\b", header, re.MULTILINE)
    assert '"--steps"' in text


def test_grpo_has_eighty_lines() -> None:
    """Of code: without blank lines, comments and docstrings."""
    text = (ROOT / "examples" / "grpo.py").read_text()
    prose = docstring_lines(ast.parse(text))
    code = [line for number, line in enumerate(text.splitlines(), 1) if number not in prose and line.strip()]

    assert len([line for line in code if not line.strip().startswith("#")]) <= MAX_CODE_LINES_OF_GRPO


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_each_example_has_a_link(path: Path) -> None:
    """In the page of trainers, or where its protocol is described."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    assert any(f"examples/{path.name})" in page.read_text() for page in pages)
