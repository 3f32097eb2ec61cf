"""The generated parts of docs/wire.md equal the code, and its sessions run."""

import doctest

import pytest

from tests.schemas.wire_tables import DOC, ENUMS, LISTS, STRUCTS, TABLE, with_tables


def test_the_generated_parts_of_the_document_equal_the_code() -> None:
    """Fields, codes and limits in the document equal the code. `python -m tests.schemas.wire_tables` writes them."""
    text = DOC.read_text()

    assert text == with_tables(text)


def test_the_document_has_a_part_for_each_struct_and_enum() -> None:
    """The document has a part for each struct and enum of the wire format; protocol.md and metrics.md have the rest."""
    assert {match[1] for match in TABLE.finditer(DOC.read_text())} == {*STRUCTS, *ENUMS, *LISTS}


def test_each_repl_session_of_the_document_has_the_documented_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each REPL session in the document, run in the repository's root, has the documented output."""
    monkeypatch.chdir(DOC.parents[1])
    results = doctest.testfile(str(DOC), module_relative=False)

    assert results.attempted > 20
    assert results.failed == 0
