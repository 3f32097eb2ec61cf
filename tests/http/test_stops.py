"""Strings to stop at."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbus.frontend.http.detokenizer import Detokenizer
from rollbus.frontend.http.stops import AnswerText, StopMatcher, TextDelta
from tests.http.small_tokenizers import SPECIAL, byte_level

LETTERS = "ab"
"""Few, so that stop strings begin, fail and overlap."""


def expected(texts: list[str], stops: list[str], include_stop: bool, min_tokens: int) -> tuple[str, int, str | None]:
    """What vLLM does, token by token: text, how many tokens it has, and the stop string."""
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
    """The same from what an answer's text says call by call, which must not take anything back."""
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
def test_the_matcher_is_vllms(texts: list[str], stops: list[str], include_stop: bool, min_tokens: int) -> None:
    """The earliest end counts, then the order of the stop strings; early tokens complete none."""
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
def test_the_split_makes_no_difference(
    words: list[list[str]], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    """At once, one by one, or in between: the same text, of the same number of tokens."""
    tokenizer = byte_level()
    pieces = [tokenizer.encode("".join(piece), add_special_tokens=False) for piece in words]
    ids = [token_id for piece in pieces for token_id in piece]
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.add([token_id]) for token_id in ids]

    for split in ([ids], [[token_id] for token_id in ids], pieces):
        assert answer(split, stops, include_stop, min_tokens) == expected(texts, stops, include_stop, min_tokens)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    """No more than that, and it comes once it is certain that it does not."""
    matcher = StopMatcher(["abc", "xx"])

    assert [matcher.add(text) for text in ("1a", "b", "a", "x", "a!")] == ["1", "", "ab", "a", "xa!"]
    assert matcher.add("ab") == ""
    assert matcher.flush() == "ab"


def test_nothing_is_held_back_if_the_stop_string_is_included() -> None:
    """The text up to its end is the answer anyway."""
    matcher = StopMatcher(["abc"], include_stop=True)

    assert [matcher.add(text) for text in ("1a", "b", "c2")] == ["1a", "b", "c"]
    assert matcher.stop == "abc"


def test_the_token_that_completes_it_is_kept() -> None:
    """A stop string that ends amid a token: the token belongs to the answer, those behind it do not."""
    tokenizer = byte_level()
    ids = tokenizer.encode("é the the", add_special_tokens=False)
    assert len(ids) == 3

    delta = AnswerText(Detokenizer(tokenizer), StopMatcher([" t"])).add(ids)

    assert delta == TextDelta("é", 2, " t")


@pytest.mark.parametrize(("include_stop", "text"), [(False, "t"), (True, "th")])
def test_a_stop_token_has_no_text(include_stop: bool, text: str) -> None:
    """A stop token of the engine's is kept, and its text is treated like a stop string's."""
    tokenizer = byte_level()
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in ("t", "h")]
    stream = AnswerText(Detokenizer(tokenizer), StopMatcher([], include_stop))

    assert stream.add(ids, final=True, by_stop_token=True) == TextDelta(text, 2)


def test_the_end_brings_what_was_held_back() -> None:
    """Half a stop string and half a character are text when nothing follows."""
    tokenizer = byte_level()
    ids = [*tokenizer.encode("the", add_special_tokens=False), *tokenizer.encode("€", add_special_tokens=False)[:2]]
    stream = AnswerText(Detokenizer(tokenizer), StopMatcher(["e!"]))

    assert stream.add(ids).text == "th"
    assert stream.add(tokenizer.encode(SPECIAL, add_special_tokens=False), final=True) == TextDelta("e\ufffd", 1)
