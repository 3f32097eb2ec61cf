"""The incremental detokenizer."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbus.frontend.http import Settings
from rollbus.frontend.http.chat import Chat, encode_chat, encode_text
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.text import AnswerText, Detokenizer, StopMatcher, TextDelta
from rollbus.frontend.tokenization import SHORT_TEXT, Tokenizer, load_tokenizer, token_text
from rollbus.schemas.errors import InvalidRequest
from tests.http.support import (
    SPECIAL,
    Serve,
    byte_fallback,
    byte_level,
    http_service,
    make_byte_level,
    save,
    word_piece,
)

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
@example([*range(256, VOCABULARY)], True)
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
        special_ids: frozenset[int] = frozenset()

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


# Stop strings.


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
def test_any_split_of_the_tokens_gives_the_same_text_of_stops(
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


# `/tokenize` and `/detokenize`.


USER = {"role": "user", "content": "the"}


@contextlib.asynccontextmanager
async def serving(nats_url: str, fleet: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a model whose tokenizer adds a special token at the start of texts."""
    from tokenizers import processors

    tokenizer = make_byte_level()
    tokenizer.add_special_tokens([SPECIAL])
    begin = (SPECIAL, tokenizer.token_to_id(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL} $A", special_tokens=[begin])
    async with http_service(nats_url, fleet, Settings(tokenizer=save(tokenizer, folder))) as http:
        yield http.client


async def post(client: httpx.AsyncClient, path: str, **body: object) -> Any:
    """Return the response to a valid request."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]


async def chat_text(**chat: Any) -> str:
    """Return the prompt of a chat as text."""
    ids = await encode_chat(byte_level(), Chat(**chat))
    return byte_level().decode(ids, skip_special_tokens=False)


async def test_the_tokens_of_a_text_decode_to_the_same_text(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A text has its special tokens unless the request disables them, and its tokens decode to the same text."""
    text = "the é 🙂"
    async with serving(nats_url, fleet, tmp_path) as client:
        plain = await post(client, "/v1/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
        default = await post(client, "/tokenize", model="synthetic", prompt=text)
        back = await post(client, "/v1/detokenize", tokens=default["tokens"])
        (model,) = (await client.get("/v1/models")).json()["data"]
        nothing = await post(client, "/detokenize", tokens=[])
        half = await post(client, "/detokenize", tokens=plain["tokens"][:-1])

    assert list(plain) == ["count", "max_model_len", "tokens", "token_strs"]
    assert plain["token_strs"] == ["the", "Ġ", "Ã©", "Ġ", "ðŁ", "Ļ", "Ĥ"]
    assert (plain["count"], plain["max_model_len"]) == (7, model["max_model_len"])
    assert (len(default["tokens"]), default["tokens"][1:]) == (default["count"], plain["tokens"])
    assert default["token_strs"] is None
    assert back == {"prompt": f"{SPECIAL}{text}"}
    assert nothing == {"prompt": ""}
    assert half == {"prompt": "the é \ufffd"}


async def test_a_chat_has_the_text_of_its_template(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A chat has the text of its template, with special tokens around it only on request."""

    async def tokenized(**body: object) -> str:
        tokens = (await post(client, "/v1/tokenize", messages=[USER], **body))["tokens"]
        return str((await post(client, "/v1/detokenize", tokens=tokens))["prompt"])

    async with serving(nats_url, fleet, tmp_path) as client:
        assert await tokenized() == "<user>the<|end|><assistant>"
        assert await tokenized(add_generation_prompt=False) == "<user>the<|end|>"
        for flags in ({}, {"add_generation_prompt": False}):
            assert await tokenized(continue_final_message=True, **flags) == "<user>the"
        assert await tokenized(add_special_tokens=True) == "<|end|><user>the<|end|><assistant>"
        assert await tokenized(chat_template_kwargs={"opening": "e"}) == "<user>the<|end|><assistant>e"
        tool = {"type": "function", "function": {"name": "search"}}
        assert await tokenized(tools=[tool]) == "(search)<user>the<|end|><assistant>"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
    ("tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ("tokenize", {"messages": []}, "messages"),
    ("tokenize", {"messages": [USER, {"content": "a"}]}, "messages[1].role"),
    ("tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
    (
        "tokenize",
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (
        "tokenize",
        {"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs.add_generation_prompt",
    ),
    ("tokenize", {"messages": [USER], "chat_template_kwargs": {"eos_token": ""}}, "chat_template_kwargs.eos_token"),
    ("tokenize", {"messages": [USER], "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ("detokenize", {"tokens": [0, 1, 400, 401]}, "tokens[2]"),
    ("detokenize", {"tokens": [2**31 - 1]}, "tokens[0]"),
]


async def test_a_wrong_field_gives_400_with_its_name(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A wrong field gives 400 with its name."""
    async with serving(nats_url, fleet, tmp_path) as client:
        for path, body, param in WRONG:
            answer = await client.post(f"/v1/{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
            assert param in answer.json()["error"]["message"]


async def test_unknown_models_and_missing_tokenizers_are_refused(
    serve: Serve, nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An unknown model gives 404, and a missing tokenizer gives 501."""
    async with serving(nats_url, fleet, tmp_path) as client:
        unknown = await client.post("/v1/tokenize", json={"model": "other", "prompt": "a"})
    async with serve() as http:
        missing = await http.client.post("/v1/detokenize", json={"tokens": [1]})

    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    assert (missing.status_code, missing.json()["error"]["code"]) == (501, "no_tokenizer")


async def test_messages_are_normalised_as_in_vllm() -> None:
    """As in vLLM, text parts are joined by line breaks and call arguments become objects.

    A missing content is empty. If the template knows no developer, all instructions are one system message.
    """
    parts = [{"type": "text", "text": "t"}, "h", {"type": "input_text", "text": "e"}]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"x": 7}', "{broken", "[1]", None, {"x": 8})
    ]
    assert await chat_text(messages=[{"role": "user", "content": parts}]) == "<user>t\nh\ne<|end|><assistant>"
    assert (
        await chat_text(messages=[{"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}])
        == '<assistant>[{"x": 7}][{}][{}][{}][{"x": 8}]<|end|><assistant>'
    )
    assert await chat_text(messages=[{"role": "tool"}], add_generation_prompt=False) == "<tool><|end|>"
    told = [{"role": role, "content": role[:3]} for role in ("system", "user", "developer")]
    assert await chat_text(messages=told, add_generation_prompt=False) == "<system>sys\n\ndev<|end|><user>use<|end|>"


async def test_a_template_gets_the_text_parts_that_it_takes(tmp_path: Path) -> None:
    """Templates such as that of GLM put text parts together themselves, as in vLLM, except those of tools."""
    taken = "{% for part in m.content %}{{ part.text or part }}{% endfor %}"
    texts = []
    for number, shown in enumerate((taken, "{{ m.content }}", "{{ m.content + '' }}")):
        template = "{% for m in messages %}<{{ m.role }}>" + shown + "{% endfor %}"
        (tmp_path / str(number)).mkdir()
        tokenizer = load_tokenizer(save(make_byte_level(), tmp_path / str(number), chat_template=template))
        parts = [{"type": "text", "text": "a"}, "b"]
        messages = [{"role": role, "content": parts} for role in ("user", "tool", "developer")]
        texts.append(tokenizer.decode(await encode_chat(tokenizer, Chat(messages=messages))))

    assert texts == ["<system>a\nb<user>ab<tool>a\nb", *["<system>a\nb<user>a\nb<tool>a\nb"] * 2]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": {}, "text": "a"}]}, "messages[0].content[0]"),
        ({"role": {}}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "messages[0].tool_calls[0]"),
        ({"role": "user", "x": DEEP}, "messages"),
    ],
)
async def test_invalid_messages_are_refused_with_their_position(message: dict[str, Any], field: str) -> None:
    """Images and values of a wrong type are refused with their position."""
    with pytest.raises(InvalidRequest) as caught:
        await encode_chat(byte_level(), Chat(messages=[message]))
    assert caught.value.field == field


async def test_a_model_without_a_chat_template_gives_501(tmp_path: Path) -> None:
    """A model without a chat template gives 501."""
    tokenizer = load_tokenizer(save(make_byte_level(), tmp_path, chat_template=None))
    with pytest.raises(HttpError, match="no chat template") as caught:
        await encode_chat(tokenizer, Chat(messages=[USER]))
    assert caught.value.status == 501


async def test_long_texts_are_tokenized_in_another_thread() -> None:
    """Long texts are tokenized in another thread, so they do not block others. Short texts are not."""
    threads = []

    class Watched:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            threads.append(threading.current_thread())
            return []

    tokenizer: Tokenizer = Watched()  # type: ignore[assignment]
    await encode_text(tokenizer, "a" * SHORT_TEXT)
    await encode_text(tokenizer, "a" * (SHORT_TEXT + 1))

    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_many_threads_share_a_tokenizer(tmp_path: Path) -> None:
    """Many threads can share a tokenizer with truncation and padding, which other calls must not change."""
    made = make_byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=8)
    tokenizer = load_tokenizer(save(made, tmp_path))
    text = "the " * SHORT_TEXT

    counts = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(16):
            tasks.create_task(encode_text(tokenizer, text)).add_done_callback(
                lambda task: counts.append(len(task.result()))
            )

    assert counts == [SHORT_TEXT + 1] * 16
