"""Tests wait for conditions and rarely sleep."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_SLEEPS = 58
"""The current number of sleeps in tests, which must not grow."""


def is_sleep(node: ast.AST) -> bool:
    """Return True for a call of `asyncio.sleep` or `time.sleep`, unless it only yields to the event loop."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep"):
        return False
    if not (isinstance(node.func.value, ast.Name) and node.func.value.id in {"asyncio", "time"}):
        return False
    return not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)


def test_no_sleep_is_added() -> None:
    """The number of sleeps in tests does not grow; CONTRIBUTING.md states when a sleep is right."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if "programs" not in path.parts]
    count = sum(is_sleep(node) for path in files for node in ast.walk(ast.parse(path.read_text())))

    assert count <= MAX_SLEEPS
