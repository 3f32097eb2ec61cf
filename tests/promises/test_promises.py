"""Each promise has a number, a test that proves it, and the code that implements it."""

import re

import pytest

from tests.promises.page import PAGE, ROOT, Proof, mentions, page, promises, proofs, proofs_in


def test_each_promise_has_a_test() -> None:
    """Each promise that is not withdrawn has at least one test with its number."""
    proven = {proof.number for proof in proofs()}

    assert [number for number, promise in promises().items() if not promise.withdrawn and number not in proven] == []


def test_each_marker_names_a_promise() -> None:
    """Each marker names a promise that exists and is not withdrawn."""
    valid = {number for number, promise in promises().items() if not promise.withdrawn}

    assert [proof for proof in proofs() if proof.number not in valid] == []


def test_each_mention_names_a_promise() -> None:
    """README.md, docs/ and the packages mention only existing numbers."""
    assert {number: files for number, files in mentions().items() if number not in promises()} == {}


def test_no_number_is_left_out() -> None:
    """The numbers are P1, P2 and so on without a gap, so that a removed promise is noticed."""
    assert sorted(promises(), key=lambda number: int(number[1:])) == [f"P{n + 1}" for n in range(len(promises()))]


def test_each_promise_names_the_code() -> None:
    """Each promise that is not withdrawn names code files that exist."""
    known = promises().values()

    assert [promise.number for promise in known if not promise.withdrawn and not promise.where] == []
    assert [path for promise in known for path in promise.where if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("promise", promises().values(), ids=list(promises()))
def test_the_text_is_short(promise: object) -> None:
    """A promise has at most four sentences of at most 30 words, each with a full stop."""
    text = getattr(promise, "text", "")
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", text)

    assert text.endswith(".")
    assert len(sentences) <= 4
    assert [sentence for sentence in sentences if len(sentence.split()) > 30] == []


def test_the_page_is_current() -> None:
    """docs/promises.md equals the page that `python -m tests.promises` writes."""
    assert PAGE.read_text() == page()


def test_markers_are_found_where_pytest_allows_them() -> None:
    """A marker counts on a function and in a module's `pytestmark`, alone, in a list or beside other markers."""
    source = """
pytestmark = [pytest.mark.slow, pytest.mark.proves("P1")]

@pytest.mark.slow
@pytest.mark.proves("P2", "P3")
async def test_one(): ...

@pytest.mark.proves("P1")
def test_two(): ...

@pytest.mark.proves("P9")
def helper(): ...
"""
    assert list(proofs_in(source, "x.py")) == [
        Proof("P1", "x.py", "test_one"),
        Proof("P2", "x.py", "test_one"),
        Proof("P3", "x.py", "test_one"),
        Proof("P1", "x.py", "test_two"),
    ]
    assert list(proofs_in('pytestmark = pytest.mark.proves("P7")\ndef test_it(): ...', "y.py")) == [
        Proof("P7", "y.py", "test_it")
    ]
