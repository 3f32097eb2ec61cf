"""docs/wire.md says what the code does: its tables are the code's, and its sessions run."""

import doctest

import pytest

from tests.schemas.wire_tables import DOC, ENUMS, LISTS, STRUCTS, TABLE, with_tables


def test_the_tables_are_those_of_the_code() -> None:
    """Fields, codes and limits stand in the document as they are: `python -m tests.schemas.wire_tables`."""
    text = DOC.read_text()

    assert text == with_tables(text)


def test_no_message_is_left_out() -> None:
    """Every struct and every closed set of words on the wire has its table."""
    assert {match[1] for match in TABLE.finditer(DOC.read_text())} == {*STRUCTS, *ENUMS, *LISTS}


def test_the_sessions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every REPL session in the document gives what it shows, started in the repository's root."""
    monkeypatch.chdir(DOC.parents[1])
    results = doctest.testfile(str(DOC), module_relative=False)

    assert results.attempted > 20
    assert results.failed == 0
