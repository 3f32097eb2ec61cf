"""A client in the cells of a notebook: kept over cells, connected at its first use, closed without references."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

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
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.errors import BusClosed, ControlCode, InvalidRequest
from tests.bus.test_sync_client import in_thread
from tests.support.fleet import StartServed
from tests.support.presences import presence
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
