"""The subjects, states and diagrams in docs/protocol.md equal the code."""

from tests.protocol.protocol_doc import DOC, PART, names_of_parts, with_parts


def test_the_generated_parts_of_the_document_equal_the_code() -> None:
    """The generated parts of the document equal the code. `python -m tests.protocol.protocol_doc` writes them."""
    text = DOC.read_text()

    assert text == with_parts(text)


def test_the_document_contains_each_machine_exactly_once() -> None:
    """The document contains the states and the diagram of each machine exactly once."""
    assert sorted(match[1] for match in PART.finditer(DOC.read_text())) == sorted(names_of_parts())
