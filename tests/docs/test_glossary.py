"""Public names use the terms of docs/glossary.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bus", "frontend", "integrations", "schemas", "trainer", "workers")
PARAMETER = "a parameter of vLLM and of OpenAI's API has this name"
EXEMPT = {
    "bad_words_ids": PARAMETER,
}
"""Public names that may contain an excluded word, with the reason."""


def rows() -> list[list[str]]:
    """Return the cells of each row of the glossary's tables."""
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| **")]


def excluded_words() -> set[str]:
    """Return the words in the last column that are set as code."""
    return {word for row in rows() for word in re.findall(r"`(\w+)`", row[3])}


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake or camel case, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}


def public_names() -> set[str]:
    """Return the names of public classes, functions and methods of the packages."""
    return {
        node.name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    }


def test_every_term_has_one_row_and_one_sentence() -> None:
    """Each term has one row, and its meaning is one sentence."""
    terms = [row[0] for row in rows()]

    assert len(terms) == len(set(terms)) > 50
    assert [row[0] for row in rows() if len(row) != 4 or not re.fullmatch(r"[A-Z][^.]*(\.\w[^.]*)*\.", row[1])] == []


def test_public_names_use_the_terms() -> None:
    """No public class, function or method has an excluded word in its name, except the names in `EXEMPT`."""
    excluded = excluded_words()
    found = {name for name in public_names() if words_of(name) & excluded}

    assert excluded > {"look", "take", "hear", "tell", "say", "word", "leg"}
    assert found - set(EXEMPT) == set()
