"""The subjects, states and diagrams in docs/protocol.md equal the code."""

import enum
import re

import pytest

from tests.protocol.protocol_doc import DOC, PART, STATES, meanings, names_of_parts, with_parts


def test_the_generated_parts_of_the_document_equal_the_code() -> None:
    """The generated parts of the document equal the code. `python -m tests.protocol.protocol_doc` writes them."""
    text = DOC.read_text()

    assert text == with_parts(text)


def test_the_document_contains_each_machine_exactly_once() -> None:
    """The document contains the states, events and diagram of each machine exactly once."""
    assert sorted(match[1] for match in PART.finditer(DOC.read_text())) == sorted(names_of_parts())


@pytest.mark.parametrize("kind", STATES.values(), ids=STATES)
def test_the_docstring_of_each_state_has_two_sentences(kind: type[enum.StrEnum]) -> None:
    """The docstring of each state has two sentences: its meaning, and its consequence or the next state."""
    counts = {value: len(re.findall(r"\.(?: |$)", meaning)) for value, meaning in meanings(kind).items()}

    assert counts == dict.fromkeys(counts, 2)
