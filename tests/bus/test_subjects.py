"""Every name becomes one subject token and back, and no name reaches another name's subject."""

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbus.bus.subjects import Subjects, decode_token, encode_token
from rollbus.schemas.errors import InvalidRequest

LEGAL = re.compile(r"[A-Za-z0-9_=\-]+")
SUBJECTS = Subjects("default")


@given(st.text(st.characters(codec="utf-8"), min_size=1))
@example("Qwen/Qwen3-30B-A3B")
@example("a.b*c>d e=2E")
@example("\x00\r\n\t")
def test_any_name_becomes_one_subject_token_and_back(name: str) -> None:
    """The token of any name has no dot, wildcard or space, and decodes to the name."""
    token = encode_token(name)

    assert LEGAL.fullmatch(token)
    assert decode_token(token) == name


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"), min_size=1))
def test_two_names_never_share_a_token(one: str, other: str) -> None:
    """Two different model names have different tokens and therefore separate queues."""
    assert (encode_token(one) == encode_token(other)) == (one == other)


@given(st.text(alphabet="ab=2Ef3.Éé*\ud800", min_size=1))
def test_tokens_that_no_name_encodes_to_are_refused(token: str) -> None:
    """A token decodes exactly if encoding its name returns it, so each name has one token."""
    try:
        name = decode_token(token)
    except ValueError:
        return
    assert encode_token(name) == token


@pytest.mark.parametrize("token", ["", "a.b", "=2", "=2e", "=41", "=FF", "a b", "é", "*"])
def test_other_spellings_of_a_token_are_refused(token: str) -> None:
    """Lower-case or unnecessary escapes, bytes that are not UTF-8, and raw characters are rejected."""
    with pytest.raises(ValueError, match=r"."):
        decode_token(token)


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_names_without_a_token_are_refused(name: str) -> None:
    """An empty name and a name that is not valid Unicode have no token."""
    with pytest.raises(ValueError, match=r"."):
        encode_token(name)


def test_names_that_are_safe_stay_readable() -> None:
    """Letters, digits, _ and - encode to themselves, and other characters to their bytes."""
    assert encode_token("my-model_7") == "my-model_7"
    assert encode_token("Qwen/Qwen3.5") == "Qwen=2FQwen3=2E5"


def test_the_subjects_equal_the_names_of_the_table() -> None:
    """The subjects equal the fixed names that programs without this library use."""
    assert [
        SUBJECTS.request("c", "a/b", "normal"),
        SUBJECTS.requests_in("a/b", "resume"),
        SUBJECTS.direct("c", "w"),
        SUBJECTS.directs_to("w"),
        SUBJECTS.frame("c", "w"),
        SUBJECTS.frames_to("c"),
        SUBJECTS.link("c", "w"),
        SUBJECTS.links_to("w"),
        SUBJECTS.plain("c"),
        SUBJECTS.presence("w"),
        SUBJECTS.presences,
        SUBJECTS.client("c"),
        SUBJECTS.clients,
        SUBJECTS.ping_by("c"),
        SUBJECTS.pings,
        SUBJECTS.ping,
    ] == [
        "rb.v1.default.req.c.a=2Fb.normal",
        "rb.v1.default.req.*.a=2Fb.resume",
        "rb.v1.default.direct.c.w",
        "rb.v1.default.direct.*.w",
        "rb.v1.default.frame.c.w",
        "rb.v1.default.frame.c.*",
        "rb.v1.default.link.c.w",
        "rb.v1.default.link.*.w",
        "rb.v1.default.plain.c.",
        "rb.v1.default.presence.w",
        "rb.v1.default.presence.*",
        "rb.v1.default.client.c",
        "rb.v1.default.client.*",
        "rb.v1.default.ping.c",
        "rb.v1.default.ping.*",
        "rb.v1.default.ping",
    ]


BAD_TOKENS = ["", ".", "a.b", "*", ">", "a b", "a\n", "a=b", "ü", "x" * 65]


@pytest.mark.parametrize("name", BAD_TOKENS)
@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("fleet", Subjects),
        ("client", lambda name: SUBJECTS.request(name, "m", "low")),
        ("client", lambda name: SUBJECTS.frame(name, "w")),
        ("worker", lambda name: SUBJECTS.frame("c", name)),
        ("client", SUBJECTS.frames_to),
        ("client", lambda name: SUBJECTS.link(name, "w")),
        ("worker", lambda name: SUBJECTS.link("c", name)),
        ("worker", SUBJECTS.links_to),
        ("client", lambda name: SUBJECTS.direct(name, "w")),
        ("worker", lambda name: SUBJECTS.direct("c", name)),
        ("worker", SUBJECTS.directs_to),
        ("client", SUBJECTS.plain),
        ("worker", SUBJECTS.presence),
        ("client", SUBJECTS.client),
    ],
)
def test_names_that_would_reach_other_subjects_are_refused(
    field: str, make: Callable[[str], object], name: str
) -> None:
    """A dot, wildcard or space in a fleet, client or worker name raises an error that names the field."""
    with pytest.raises(InvalidRequest) as caught:
        make(name)

    assert caught.value.field == field
    assert caught.value.allowed == "1 to 64 of A-Z a-z 0-9 _ -"
