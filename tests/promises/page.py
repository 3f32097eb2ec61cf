"""Generates docs/promises.md from promises.toml and from the markers of the tests.

The tests are parsed, not imported. A test names its promises with `@pytest.mark.proves("P1", "P2")`. A `proves` marker
in the `pytestmark` of a module applies to each of its tests.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"
SOURCE = Path(__file__).with_name("promises.toml")
MENTION = re.compile(r"\bP[1-9][0-9]*\b")
PACKAGES = ("bus", "frontend", "integrations", "schemas", "trainer", "workers")


HEAD = """# Promises

A program may rely on each sentence of this page. The numbers never change: a promise that is withdrawn keeps its
number. Each promise names the code that implements it and the tests that prove it.

`python -m tests.promises` writes this page from [promises.toml](../tests/promises/promises.toml) and from the
`proves` markers of the tests."""


@dataclass(frozen=True)
class Promise:
    """A promise of promises.toml."""

    number: str
    text: str
    group: str
    where: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    withdrawn: str = ""


@dataclass(frozen=True)
class Proof:
    """A test that names a promise."""

    number: str
    path: str
    """Path of the test file, from the root of the repository."""
    test: str


@cache
def promises() -> dict[str, Promise]:
    """Return all promises by number, in the order of the file."""
    entries = tomllib.loads(SOURCE.read_text())
    return {
        number: Promise(
            number=number,
            text=entry["text"],
            group=entry["group"],
            where=tuple(entry.get("where", ())),
            run=tuple(entry.get("run", ())),
            withdrawn=entry.get("withdrawn", ""),
        )
        for number, entry in entries.items()
    }


@cache
def proofs() -> tuple[Proof, ...]:
    """Return the proofs of all test files, sorted by file and by place in the file."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(proof for file in files for proof in proofs_in(file.read_text(), file.relative_to(ROOT).as_posix()))


def proofs_in(source: str, path: str) -> Iterator[Proof]:
    """Yield the promises of each test in this source."""
    module = ast.parse(source)
    common = [number for node in module.body for number in _numbers_of_module(node)]
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            own = [number for decorator in node.decorator_list for number in _numbers(decorator)]
            for number in dict.fromkeys([*common, *own]):
                yield Proof(number, path, node.name)


def _numbers_of_module(node: ast.stmt) -> list[str]:
    """Return the promise numbers in an assignment to `pytestmark`, and an empty sequence for any other statement."""
    match node:
        case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
            marks = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            return [number for mark in marks for number in _numbers(mark)]
        case _:
            return []


def _numbers(mark: ast.expr) -> list[str]:
    """Return the numbers of a `pytest.mark.proves(...)` expression, and an empty sequence for any other expression."""
    if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "pytest.mark.proves":
        return []
    return [str(ast.literal_eval(argument)) for argument in mark.args]


def mentions() -> dict[str, list[str]]:
    """Return the promise numbers in README.md, docs/ and the packages, each with the files that mention it."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    files += [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if file != PAGE:
            for number in sorted(set(MENTION.findall(file.read_text()))):
                found.setdefault(number, []).append(file.relative_to(ROOT).as_posix())
    return found


def page() -> str:
    """Return the text of docs/promises.md."""
    known = promises()
    parts = [HEAD]
    for group in dict.fromkeys(promise.group for promise in known.values()):
        parts.append(f"## {group}")
        parts += [_entry(promise) for promise in known.values() if promise.group == group]
    return "\n\n".join(parts) + "\n"


def _entry(promise: Promise) -> str:
    """Return the section of one promise."""
    if promise.withdrawn:
        return f"### {promise.number}\n\nWithdrawn: {promise.withdrawn} The promise was: {promise.text}"
    tests: dict[str, list[str]] = {}
    for proof in proofs():
        if proof.number == promise.number:
            tests.setdefault(proof.path, []).append(f"`{proof.test}`")
    lines = [f"### {promise.number}", "", promise.text, "", f"- Code: {', '.join(map(_link, promise.where))}"]
    lines += ["- Tests:", *(f"    - {_link(path)}: {', '.join(names)}" for path, names in tests.items())]
    lines += [f"- Program: `{command}`" for command in promise.run]
    return "\n".join(lines)


def _link(path: str) -> str:
    return f"[{path}](../{path})"
