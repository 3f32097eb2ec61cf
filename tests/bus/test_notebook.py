"""A client in the cells of a notebook: kept over cells, connected at its first use, closed without references."""

import gc
import json
import logging
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rollbus
from rollbus import (
    CommandResult,
    FleetState,
    GenerateRequest,
    Group,
    GroupStats,
    GroupStep,
    PublishedWeights,
    QueueDepth,
    SamplingParams,
)
from rollbus.bus.client.generation import join_samples
from rollbus.bus.logs import JsonFormatter, RejectionCount, adopt_line
from rollbus.bus.subjects import Subjects, decode_token, encode_token
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.errors import BusClosed, ControlCode, InvalidRequest
from tests.bus.test_sync import in_thread
from tests.support.fleet import StartServed, presence
from tests.support.processes import becomes_true
from tests.support.requests import endless, greedy


def num_owners() -> int:
    """Return the number of threads that own a blocking client."""
    return sum(thread.name == "rollbus-owner" for thread in threading.enumerate())


async def test_a_client_connects_at_its_first_use_and_can_be_opened_again(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """A client connects at its first use, stays connected, and connects again with `open` after `close`."""

    def program() -> None:
        rb = rollbus.sync.connect(nats_url, fleet=fleet)
        assert num_owners() == 0
        workers = rb.fleet
        assert len(rb.complete([1, 2, 3], max_tokens=4).token_ids) == 4
        owner = rb._owner
        assert rb.open() is rb
        assert rb._owner is owner
        rb.close()
        rb.close()
        assert num_owners() == 0
        uses: list[Callable[[], object]] = [
            lambda: rb.complete([1]),
            workers.state,
            lambda: list(rb.generate([1])),
            lambda: rb.groups([], n=1, need=1),
        ]
        for use in uses:
            with pytest.raises(BusClosed, match="this client was closed; `open` connects it again"):
                use()
        rb.open()
        assert len(workers.state().workers) == 1
        with rb:
            assert len(rb.complete([1, 2, 3], max_tokens=4).token_ids) == 4
        with pytest.raises(BusClosed, match="this client was closed"):
            rb.stats()

    async with one_worker():
        await in_thread(program)


async def test_threads_that_use_a_new_client_share_one_connection(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """Threads whose first uses coincide connect the client once."""

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()
        rb = rollbus.sync.connect(nats_url, fleet=fleet)
        threads = [threading.Thread(target=rb.complete, args=(short,)) for short in ([1], [2], [3], [4])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (num_owners(), rb.stats().requests) == (1, 4)
        rb.close()

    async with one_worker():
        await in_thread(program)


async def test_a_client_without_references_closes_itself(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """If a cell runs again, the client that it replaces closes itself, and the new client of the same name serves it.

    Streams, groups, publishers and the fleet keep their client open.
    """

    def program() -> None:
        for run in range(2):
            rb = rollbus.sync.connect(nats_url, fleet=fleet, client="notebook")
            rb.fleet.wait_for_workers()
            assert len(rb.complete([1, 2, 3], max_tokens=4, request_id="same").token_ids) == 4, run
        del rb
        kept: list[Any] = [
            rollbus.sync.connect(nats_url, fleet=fleet).generate(endless()),
            rollbus.sync.connect(nats_url, fleet=fleet).groups([], n=1, need=1),
            rollbus.WeightPublisher(rollbus.sync.connect(nats_url, fleet=fleet), model="m"),
            rollbus.sync.connect(nats_url, fleet=fleet).fleet,
        ]
        next(kept[0])
        gc.collect()
        assert becomes_true(lambda: num_owners() == len(kept))
        assert len(kept[3].state().workers) == 1
        while kept:
            kept.pop()
            gc.collect()
            assert becomes_true(lambda: num_owners() == len(kept))

    async with one_worker():
        await in_thread(program)


async def test_token_ids_with_keywords_are_requests(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Both clients take the token ids of a prompt, with fields of the request and of its sampling as keywords."""
    request = greedy(1, 5)
    prompt, sampling = request.prompt_token_ids, request.sampling
    fields: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0.0,
        "ignore_eos": sampling.ignore_eos,
        "model": "synthetic",
    }

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as blocking:
            blocking.fleet.wait_for_workers()
            results.append(blocking.complete(prompt, **fields))
            results.append(blocking.complete(prompt_token_ids=prompt, sampling=sampling))
            results.extend(blocking.complete_many([prompt, np.asarray(prompt)], **fields))
            streamed.append(np.concatenate([chunk.token_ids for chunk in blocking.generate(prompt, **fields)]))

    async with one_worker() as (rb, *_):
        fields["model"] = (await rb.fleet.state()).workers[0].model
        expected = (await rb.complete(request)).token_ids
        results, streamed = [await rb.complete(prompt, **fields)], []
        results += [each async for each in rb.complete_many([list(prompt), request.prompt_token_ids], **fields)]
        streamed.append(np.concatenate([chunk.token_ids async for chunk in rb.generate(prompt, **fields)]))
        await in_thread(program)
    for tokens in (*streamed, *(result.token_ids for result in results)):
        np.testing.assert_array_equal(tokens, expected)
    assert len(results) == 7


def test_results_have_a_short_line_and_a_table() -> None:
    """Results, fleet states and published weights have a repr of one line, and a table in which names are escaped.

    Neither shows token ids.
    """
    evil = "<script>alert(1)</script>"
    error = AckError(code=ControlCode.BAD_SOURCE, message=evil)
    ack = Ack(command="pause", id="c", worker="a", incarnation="1", model="m", status=AckStatus.FAILED, error=error)
    ledger = CommandResult(command="pause", id="c", failed={"a": ack}, missing={"b": evil})
    generation = join_samples(greedy(1, 2, model=evil), (), None)
    queue = QueueDepth(model="m", lane="normal", waiting=7, in_hand=0)
    results: list[Any] = [
        ledger,
        generation,
        FleetState(fleet="f", workers=(presence(model=evil),), queues=(queue,)),
        PublishedWeights(
            version=3, objects=evil, digest="d", is_anchor=False, num_tensors=9, num_changed=2, model_bytes=100,
            stored_bytes=7, compare_s=0.1, upload_s=0.1, seconds=0.25, ledger=ledger,
        ),
        make_step([Group(key=1, request=generation.request, generations=(generation,), steps=1)]),
    ]  # fmt: skip
    for result in results:
        line, table = repr(result), result._repr_html_()
        assert line.startswith(f"<{type(result).__name__} ")
        assert len(line) < 200
        assert "\n" not in line
        assert table.startswith("<table><caption>")
        assert "<script>" not in table
        assert evil not in table
        assert str(np.asarray(generation.request.prompt_token_ids).tolist()) not in line + table
    assert repr(results[2]).endswith("; 7 requests wait>")
    assert "version=3 delta changed=2 of 9 tensors stored=7 of 100 bytes" in repr(results[3])


def make_step(groups: list[Group]) -> GroupStep:
    """Return a step of these groups."""
    lengths = np.array([3, 5], np.int32)
    stats = GroupStats(
        taken=lengths, carried=lengths[:0], dropped=lengths[:0], seconds=2.0, started=1, continued=0, carried_complete=0
    )
    return GroupStep(groups=tuple(groups), dropped=(), failed=(), stats=stats)


WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda rb: rb.complete(prompt=[1]), r"prompt is unknown \(use prompt_token_ids\); allowed: max_tokens, "),
    (lambda rb: rb.complete([1], stop="\n"), r"stop is unknown \(use stop_token_ids; the HTTP service takes stop"),
    (lambda rb: list(rb.generate([1], max_new_tokens=8)), r"max_new_tokens is unknown \(use max_tokens\)"),
    (lambda rb: list(rb.complete_many([[1]], temprature=1)), r"temprature is unknown \(did you mean temperature\?\)"),
    (lambda rb: rb.complete("text"), "prompt_token_ids is text; allowed: token ids, such as tokenizer.encode"),
    (lambda rb: rb.complete([1.5]), r"prompt_token_ids\[0\] is 1.5, not an integer"),
    (lambda rb: rb.complete([1], max_tokens=0), "sampling.max_tokens is 0; allowed: an integer from 1"),
    (lambda rb: rb.complete([1], max_tokens=8, sampling=SamplingParams()), "max_tokens is given beside sampling"),
    (lambda rb: rb.complete(greedy(1, 2), max_tokens=8), "max_tokens is given beside a request; allowed: fields of"),
    (
        lambda rb: list(rb.complete_many([1, 2, 3])),
        "requests has 1; allowed: requests, or the token ids of each prompt",
    ),
    (lambda rb: list(rb.complete_many(["text"])), "prompt_token_ids is text"),
    (lambda _: GenerateRequest(prompt=[1]), r"prompt is unknown \(use prompt_token_ids\)"),  # type: ignore[call-arg]
    (lambda _: GenerateRequest(prompt_token_ids=[1], max_tokens=8), r"\(it is a field of SamplingParams\)"),  # type: ignore[call-arg]
    (lambda _: SamplingParams(stop=["\n"]), r"stop is unknown \(use stop_token_ids"),  # type: ignore[call-arg]
]


def test_a_wrong_keyword_names_the_right_one(nats_url: str, fleet: str) -> None:
    """The error for a wrong keyword or argument says what is meant."""
    with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
        for call, message in WRONG:
            with pytest.raises(InvalidRequest, match=message):
                call(rb)
    with pytest.raises(TypeError, match=r"GenerateRequest takes its fields by name, such as prompt_token_ids=\.\.\."):
        GenerateRequest([1])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Missing required argument 'prompt_token_ids'"):
        GenerateRequest()  # type: ignore[call-arg]


def line_of(message: object, *args: object, **more: Any) -> dict[str, Any]:
    """Return the JSON line of `logger.info(message, *args)`."""
    record = logging.LogRecord("some.logger", logging.INFO, "file.py", 1, message, args, more.get("exc_info"))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_an_event_and_its_fields_are_a_line() -> None:
    """A log line has separate time, level, logger, event and fields. The event may contain a formatted part."""
    line = line_of("worker.%s worker=%s reason=%s", "paused", "w0", "it was told to")

    assert line.pop("time").endswith("Z")
    fields = {"worker": "w0", "reason": "it was told to"}
    assert line == {"level": "info", "logger": "some.logger", "event": "worker.paused", "fields": fields}


def test_numbers_stay_numbers() -> None:
    """Numbers, booleans and None are JSON values, rounded as in the text. Other values become text."""
    values = (3, 1.23456, float("nan"), None, True, {"a": 1}, ValueError("no"), "x")
    line = line_of("an.event n=%d s=%.3f nan=%.1f none=%s yes=%s map=%s error=%s text=%r", *values)

    assert line["fields"] == {
        "n": 3,
        "s": 1.235,
        "nan": "nan",
        "none": None,
        "yes": True,
        "map": "{'a': 1}",
        "error": "no",
        "text": "x",
    }


def test_a_dict_alone_is_a_field() -> None:
    """A single dict argument, which logging treats as named arguments, becomes one field."""
    assert line_of("an.event map=%s", {"a": 1})["fields"] == {"map": "{'a': 1}"}


@pytest.mark.parametrize(
    ("message", "args"), [("Started server process [%d]", (7,)), ("100%", ()), ("see http://a.b", ())]
)
def test_a_log_line_of_another_library_is_a_message(message: str, args: tuple[object, ...]) -> None:
    """A line that is not an event of rollbus has the event `message`, with its text in the field `message`."""
    line = line_of(message, *args)

    assert (line["event"], line["fields"]) == ("message", {"message": message % args if args else message})


def test_a_traceback_is_text_of_the_same_line() -> None:
    """A traceback is a field of the same line."""
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        line = line_of("an.event", exc_info=sys.exc_info())

    assert line["traceback"].startswith("Traceback")
    assert line["traceback"].endswith("ValueError: first\nsecond")


def test_users_and_passwords_of_urls_are_left_out() -> None:
    """User and password of a URL are absent from fields, messages, tracebacks and lines of other processes."""
    url = "nats://user:geheim@host:4222"
    try:
        raise ValueError(url)
    except ValueError:
        lines = [line_of("an.event url=%s error=%s", url, ValueError(url), exc_info=sys.exc_info()), line_of(url)]

    shown = json.dumps(lines) + adopt_line(f"cannot reach {url}", "w0")
    assert shown.count("nats://***@host:4222") == 5
    assert "geheim" not in shown


def test_a_line_of_another_process_has_the_name_of_its_process() -> None:
    """A JSON line of another process keeps its fields and gets the name of its process.

    Other output becomes a message.
    """
    assert json.loads(adopt_line('{"event": "a.b", "fields": {"n": 1}}', "w0")) == {
        "event": "a.b",
        "fields": {"n": 1},
        "process": "w0",
    }
    for text in ("Segmentation fault", "[1]", "7", ""):
        line = json.loads(adopt_line(text, "w0"))
        assert (line["event"], line["fields"], line["process"]) == ("message", {"message": text}, "w0")


def test_rejections_are_counted_and_logged_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rejected messages, one a second is logged, with the number of all so far."""
    now = 100.0
    monkeypatch.setattr("rollbus.bus.logs.time.monotonic", lambda: now)
    rejected = RejectionCount()
    lines = []
    for number in range(1000):
        now = 100.0 + number / 400
        lines.append(rejected.add())

    assert [line for line in lines if line] == [1, 401, 801]
    assert rejected.so_far == 1000


# Every name becomes one subject token and back, and no name reaches another name's subject.


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
def test_names_that_would_reach_other_subjects_are_refused(field: str, make: Callable[[str], object]) -> None:
    """A dot, wildcard or space in a fleet, client or worker name raises an error that names the field."""
    for name in BAD_TOKENS:
        with pytest.raises(InvalidRequest) as caught:
            make(name)
        assert caught.value.field == field
        assert caught.value.allowed == "1 to 64 of A-Z a-z 0-9 _ -"
