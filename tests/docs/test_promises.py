"""Each promise has a number, one place that states it, and a test that proves it."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ENTRY = re.compile(r"^- \*\*(P\d+)\*\* ", re.MULTILINE)
WITHDRAWN = re.compile(r"^- \*\*(P\d+)\*\* Withdrawn: ", re.MULTILINE)
MENTION = re.compile(r"\bP[1-9]\d*\b")
MARKER = re.compile(r"pytest\.mark\.proves\(([^)]*)\)")
PACKAGES = ("bus", "frontend", "integrations", "schemas", "trainer", "workers")


@cache
def stated() -> frozenset[str]:
    """Return the numbers of all promises: the list of promises.md, and the mentions of protocol.md and wire.md."""
    described = [MENTION.findall((DOCS / name).read_text()) for name in ("protocol.md", "wire.md")]
    return frozenset(ENTRY.findall((DOCS / "promises.md").read_text())).union(*described)


@cache
def proven() -> frozenset[str]:
    """Return the numbers in the `proves` markers of the tests."""
    files = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__).resolve()]
    return frozenset(number for text in files for marker in MARKER.findall(text) for number in MENTION.findall(marker))


def test_no_promise_is_left_out() -> None:
    """The stated numbers are P1, P2 and so on without a gap, so that a removed promise is noticed."""
    numbers = sorted(int(number[1:]) for number in stated())

    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 97


def test_each_promise_has_a_test() -> None:
    """Each promise has a test with its number unless it is withdrawn, and each marker names such a promise."""
    withdrawn = set(WITHDRAWN.findall((DOCS / "promises.md").read_text()))

    assert (stated() - withdrawn) ^ proven() == set()


def test_each_mention_names_a_promise() -> None:
    """README.md, docs/ and the packages mention only stated promises."""
    files = [ROOT / "README.md", *DOCS.rglob("*.md")]
    files += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]

    assert {path.name: extra for path in files if (extra := set(MENTION.findall(path.read_text())) - stated())} == {}
