"""docs/protocol.md says what the code does: its subjects, states and diagrams are the code's."""

import enum
import re

import pytest

from tests.protocol.protocol_doc import DOC, PART, STATES, meanings, names_of_parts, with_parts


def test_the_generated_parts_are_those_of_the_code() -> None:
    """What the code has stands in the document as it is: `python -m tests.protocol.protocol_doc`."""
    text = DOC.read_text()

    assert text == with_parts(text)


def test_no_part_is_left_out() -> None:
    """Every machine has its states, events and diagram in the document, once."""
    assert sorted(match[1] for match in PART.finditer(DOC.read_text())) == sorted(names_of_parts())


@pytest.mark.parametrize("kind", STATES.values(), ids=STATES)
def test_every_state_is_told_in_two_sentences(kind: type[enum.StrEnum]) -> None:
    """Each state says what it is, and what it means for others or what comes next."""
    counts = {value: len(re.findall(r"\.(?: |$)", meaning)) for value, meaning in meanings(kind).items()}

    assert counts == dict.fromkeys(counts, 2)
