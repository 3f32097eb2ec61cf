"""The incremental detokenizer."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.frontend.http.text import Detokenizer
from rollbus.frontend.tokenization import Tokenizer, token_text
from tests.http.small_tokenizers import ADDED, ROLE, SPECIAL, byte_fallback, byte_level, word_piece

FAMILIES = {"byte level": byte_level, "byte fallback": byte_fallback}
VOCABULARY = 270
"""Token ids of both families, and a few ids without a token."""


def in_pieces(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
    """Return the texts of all calls."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.add(piece) for piece in pieces), detokenizer.flush()]


def id_of(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a text that is one token."""
    (token_id,) = tokenizer.encode(text, add_special_tokens=False)
    return token_id


@given(
    st.lists(st.lists(st.integers(0, VOCABULARY), max_size=5), max_size=8),
    st.sampled_from(sorted(FAMILIES)),
    st.booleans(),
)
def test_any_split_of_the_tokens_gives_the_same_text(pieces: list[list[int]], family: str, skip: bool) -> None:
    """Any tokens give the same text at once, one by one, or in pieces."""
    tokenizer = FAMILIES[family]()
    ids = [token_id for piece in pieces for token_id in piece]

    at_once, one_by_one, between = (
        "".join(in_pieces(tokenizer, split, skip_special_tokens=skip))
        for split in ([ids], [[token_id] for token_id in ids], pieces)
    )

    assert at_once == one_by_one == between


@given(st.lists(st.integers(0, VOCABULARY), max_size=20), st.booleans())
def test_the_text_equals_the_whole_decoded_by_the_tokenizer(ids: list[int], skip: bool) -> None:
    """Any bytes, also invalid UTF-8, give the text that the tokenizer decodes from the whole."""
    tokenizer = byte_level()
    known = [token_id for token_id in ids if tokenizer.tokens([token_id]) != [""]]

    text = "".join(in_pieces(tokenizer, [[token_id] for token_id in ids], skip_special_tokens=skip))

    assert text == tokenizer.decode(known, skip_special_tokens=skip)


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁")), st.sampled_from(sorted(FAMILIES))
)
def test_no_character_is_lost(text: str, family: str) -> None:
    """Any text is returned completely, and U+FFFD never occurs in it."""
    tokenizer = FAMILIES[family]()
    ids = tokenizer.encode(text, add_special_tokens=False)

    texts = in_pieces(tokenizer, [[token_id] for token_id in ids], skip_special_tokens=False)

    assert "".join(texts) == text
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert not any("\ufffd" in part for part in texts)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_character_waits_for_all_of_its_bytes(family: str) -> None:
    """A character in several tokens appears with its last token.

    An incomplete character appears as U+FFFD at the end.
    """
    tokenizer = FAMILIES[family]()
    euro = tokenizer.encode("€", add_special_tokens=False)
    assert len(euro) == 3

    assert in_pieces(tokenizer, [[token_id] for token_id in euro]) == ["", "", "€", ""]
    assert in_pieces(tokenizer, [euro[:2]]) == ["", "\ufffd"]
    assert in_pieces(tokenizer, [euro[:2], [id_of(tokenizer, "t")]]) == ["", "\ufffdt", ""]
    # A special token in between is not part of the text.
    assert in_pieces(tokenizer, [euro[:1], [id_of(tokenizer, SPECIAL)], euro[1:]]) == ["", "", "€", ""]


def test_a_complete_character_before_a_broken_character_is_kept() -> None:
    """A complete character before a broken one is kept, although transformers replace all bytes of the run."""
    tokenizer = byte_fallback()
    euro = tokenizer.encode("€", add_special_tokens=False)

    assert in_pieces(tokenizer, [[*euro, euro[0]]]) == ["€", "\ufffd"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_character_may_begin_in_the_prompt(family: str) -> None:
    """The text has the character that it completes, and nothing else of the prompt, and keeps its first space."""
    tokenizer = FAMILIES[family]()
    prompt = tokenizer.encode("the€", add_special_tokens=False)

    assert Detokenizer(tokenizer, prompt[:-1]).add(prompt[-1:]) == "€"
    assert Detokenizer(tokenizer, prompt).add(tokenizer.encode(" the", add_special_tokens=False)) == " the"


def test_special_tokens_are_shown_on_demand() -> None:
    """Special tokens are omitted by default, other added tokens never."""
    tokenizer = byte_level()
    ids = tokenizer.encode(f"t{SPECIAL}{ROLE}{ADDED}", add_special_tokens=False)

    assert "".join(in_pieces(tokenizer, [ids])) == f"t{ADDED}"
    assert "".join(in_pieces(tokenizer, [ids], skip_special_tokens=False)) == f"t{SPECIAL}{ROLE}{ADDED}"


def test_spaces_that_the_decoder_adds_are_kept() -> None:
    """A space that the decoder adds within a text is part of the text and is never removed."""
    tokenizer = word_piece()
    ids = [1, 3, 2, 4]

    assert (
        "".join(in_pieces(tokenizer, [[token_id] for token_id in ids])).strip()
        == tokenizer.decode(ids)
        == "the catre ."
    )


def test_every_token_is_decoded_once() -> None:
    """Each token is decoded once, even if a character stays incomplete for a long time."""
    seen = []

    class Counting:
        special_ids: tuple[int, ...] = ()

        def token_bytes(self, token_id: int) -> bytes:
            seen.append(token_id)
            return b"\x80"

    detokenizer = Detokenizer(Counting(), [7] * 100)  # type: ignore[arg-type]
    before = len(seen)
    for token_id in range(100):
        assert detokenizer.add([token_id]) == "\ufffd"

    assert before <= 4
    assert seen[before:] == list(range(100))


def test_a_complete_character_is_shown_as_text_and_a_partial_as_bytes() -> None:
    """A complete character is shown as text, and a partial one as OpenAI's bytes notation."""
    assert token_text("é the".encode()) == "é the"
    assert token_text(b"\xe2\x82") == r"bytes:\xe2\x82"
    assert byte_level().tokens([id_of(byte_level(), " the"), VOCABULARY]) == ["Ġthe", ""]
    assert byte_level().token_bytes(VOCABULARY) == b""
