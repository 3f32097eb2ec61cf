"""Stop strings."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbus.frontend.http.text import AnswerText, Detokenizer, StopMatcher, TextDelta
from tests.http.small_tokenizers import SPECIAL, byte_level

LETTERS = "ab"
"""Only two letters, so that stop strings begin, fail and overlap often."""


def expected(texts: list[str], stops: list[str], include_stop: bool, min_tokens: int) -> tuple[str, int, str | None]:
    """Return text, number of tokens and stop string as vLLM computes them token by token."""
    text = ""
    for count, new in enumerate(texts, 1):
        before = len(text)
        text += new
        if count <= min_tokens:
            continue
        ends = [
            (end, index, stop)
            for index, stop in enumerate(stops)
            for end in range(before + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, _, stop = min(ends)
            return text[: end if include_stop else end - len(stop)], count, stop
    return text, len(texts), None


def answer(
    pieces: list[list[int]], stops: list[str], include_stop: bool, min_tokens: int
) -> tuple[str, int, str | None]:
    """Return the same from the deltas of an AnswerText, which never retract text."""
    tokenizer = byte_level()
    text = AnswerText(Detokenizer(tokenizer), StopMatcher(stops, include_stop), min_tokens=min_tokens)
    parts, kept = [], 0
    for index, piece in enumerate(pieces):
        delta = text.add(piece, final=index == len(pieces) - 1)
        parts.append(delta.text)
        kept += delta.kept
        if delta.stop is not None:
            assert text.tokens == kept
            return "".join(parts), kept, delta.stop
    assert text.tokens == kept
    return "".join(parts), kept, None


@given(
    st.lists(st.text(LETTERS, max_size=3), max_size=12),
    st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 3),
)
@example(["a", "ab"], ["ab", "b"], False, 0)
@example(["a", "ab"], ["b", "ab"], False, 0)
@example(["aba", "bab"], ["babb", "abab"], True, 0)
@example(["aa", "a"], ["aa"], False, 1)
def test_the_matcher_agrees_with_vllm(texts: list[str], stops: list[str], include_stop: bool, min_tokens: int) -> None:
    """As in vLLM, the earliest end decides, then the order of the stop strings. Early tokens complete none."""
    matcher = StopMatcher(stops, include_stop)
    parts, count = [], 0
    for text in texts:
        count += 1
        parts.append(matcher.add(text, may_stop=count > min_tokens))
        if matcher.stop is not None:
            break
    else:
        parts.append(matcher.flush())

    assert ("".join(parts), count, matcher.stop) == expected(texts, stops, include_stop, min_tokens)


@given(
    st.lists(st.lists(st.sampled_from(["t", "h", "the", " the", "é", "€"]), max_size=3), max_size=5),
    st.lists(st.text("the €", min_size=1, max_size=4), max_size=2),
    st.booleans(),
    st.integers(0, 3),
)
def test_any_split_of_the_tokens_gives_the_same_text(
    words: list[list[str]], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    """Any split of the tokens gives the same text and number of tokens."""
    tokenizer = byte_level()
    pieces = [tokenizer.encode("".join(piece), add_special_tokens=False) for piece in words]
    ids = [token_id for piece in pieces for token_id in piece]
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.add([token_id]) for token_id in ids]

    for split in ([ids], [[token_id] for token_id in ids], pieces):
        assert answer(split, stops, include_stop, min_tokens) == expected(texts, stops, include_stop, min_tokens)


def test_only_text_that_may_begin_a_stop_string_is_held_back() -> None:
    """Only text that may begin a stop string is held back, and it is released as soon as it cannot begin one."""
    matcher = StopMatcher(["abc", "xx"])

    assert [matcher.add(text) for text in ("1a", "b", "a", "x", "a!")] == ["1", "", "ab", "a", "xa!"]
    assert matcher.add("ab") == ""
    assert matcher.flush() == "ab"


def test_nothing_is_held_back_if_the_stop_string_is_included() -> None:
    """With the stop string included, no text is held back, because it belongs to the text anyway."""
    matcher = StopMatcher(["abc"], include_stop=True)

    assert [matcher.add(text) for text in ("1a", "b", "c2")] == ["1a", "b", "c"]
    assert matcher.stop == "abc"


def test_the_token_that_completes_a_stop_string_is_kept() -> None:
    """If a stop string ends within a token, that token is kept and later tokens are removed."""
    tokenizer = byte_level()
    ids = tokenizer.encode("é the the", add_special_tokens=False)
    assert len(ids) == 3

    delta = AnswerText(Detokenizer(tokenizer), StopMatcher([" t"])).add(ids)

    assert delta == TextDelta("é", 2, " t")


@pytest.mark.parametrize(("include_stop", "text"), [(False, "t"), (True, "th")])
def test_a_stop_token_has_no_text(include_stop: bool, text: str) -> None:
    """A stop token of the engine is kept, and its text is treated like a stop string."""
    tokenizer = byte_level()
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in ("t", "h")]
    stream = AnswerText(Detokenizer(tokenizer), StopMatcher([], include_stop))

    assert stream.add(ids, final=True, by_stop_token=True) == TextDelta(text, 2)


def test_the_end_releases_partial_stop_strings_and_characters() -> None:
    """At the end, a partial stop string and a partial character are released as text."""
    tokenizer = byte_level()
    ids = [*tokenizer.encode("the", add_special_tokens=False), *tokenizer.encode("€", add_special_tokens=False)[:2]]
    stream = AnswerText(Detokenizer(tokenizer), StopMatcher(["e!"]))

    assert stream.add(ids).text == "th"
    assert stream.add(tokenizer.encode(SPECIAL, add_special_tokens=False), final=True) == TextDelta("e\ufffd", 1)
