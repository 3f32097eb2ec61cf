"""How a client handles missing, duplicate and reordered frames, and frames of another incarnation.

A scripted worker sends them.
"""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import rollbus
from rollbus import RequestFailed
from rollbus.bus.client.client import watch_fleet
from rollbus.bus.client.fleet_state import MAX_ACK_BYTES
from rollbus.bus.client.links import MAX_WINDOW_BYTES
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats.connection import publish, subscribe
from rollbus.bus.protocol.stream.response_stream import announced_by, are_within, problem_of
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import SamplingMask, TopLogprobs
from rollbus.schemas.control import Pause, UpdateWeights
from rollbus.schemas.errors import BusBroken, ErrorCode
from rollbus.schemas.limits import MAX_WEIGHT_VERSION
from rollbus.schemas.messages import RequestKey, encode_json
from rollbus.schemas.presence import ClientState, LoraInfo
from rollbus.schemas.weights import WeightSource
from tests.support.fleet import StartServed, capabilities, presence
from tests.support.hand_worker import MODEL, HandWorker, chunk, hand_worker, request, worker_by_hand
from tests.support.nats_server import opened
from tests.support.requests import error_of
from tests.support.waits import until_true


@pytest.mark.proves("P57")
async def test_a_missing_frame_is_requested_again_and_completes_the_attempt(nats_url: str, fleet: str) -> None:
    """The client drops frames after a gap and requests them again immediately.

    The repeated frames complete the same attempt.
    """
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request()))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.frame(2, chunk(key, 2, 9, total=3))
        wanted = await worker.resend_wanted()
        await worker.frame(1, chunk(key, 1, 8))
        await worker.frame(2, chunk(key, 2, 9, total=3))
        generation = await completing
        stats = rb.stats()

    assert wanted.acked == 1
    assert list(generation.token_ids) == [7, 8, 9]
    assert generation.attempts == 1
    assert (stats.missing_frames, stats.attempts_lost) == (1, 0)
    assert stats.resends_asked >= 1


async def test_frames_for_an_earlier_client_of_the_same_name_are_ignored(nats_url: str, fleet: str) -> None:
    """The client ignores frames for an earlier client of the same name, and sends its own incarnation to the worker."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(1)))
        key = await worker.next_key()
        mine, worker.client_incarnation = worker.client_incarnation, "older"
        await worker.frame(0, chunk(key, 0, 666, total=1), admitted=(key,))
        worker.client_incarnation = mine
        await worker.frame(0, chunk(key, 0, 7, total=1), admitted=(key,))
        generation = await completing
        assert rb.stats().stale_frames == 1
        assert (await worker.links.get()).client_incarnation == mine

    assert list(generation.token_ids) == [7]


async def test_credit_is_granted_for_received_frames_and_not_for_read_results(nats_url: str, fleet: str) -> None:
    """A caller that reads nothing delays no worker: the client acknowledges its frames and grants further credit."""
    async with hand_worker(nats_url, fleet) as (worker, rb):
        stream = rb.generate(request(1000))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(anext(stream))
            key = await worker.next_key()
            await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
            await first
        before = await worker.acked(1)
        for number in range(1, 200):
            await worker.frame(number, chunk(key, number, number))
        after = await worker.acked(200)
        rest = [await anext(stream) for _ in range(199)]

    assert after.credit > before.credit >= MAX_WINDOW_BYTES
    assert [chunk.token_ids[0] for chunk in rest] == list(range(1, 200))


async def test_frame_acks_are_repeated_every_second(nats_url: str, fleet: str) -> None:
    """Every second the client repeats the frame ack of each link, so a lost message does no harm."""
    async with hand_worker(nats_url, fleet) as (worker, _):
        await worker.frame(0)
        first = await worker.next_link()
        again = await worker.next_link()

    assert (first.acked, first.credit) == (again.acked, again.credit)


async def test_a_client_publishes_presence_until_its_close(nats_url: str, fleet: str) -> None:
    """A client publishes presence before its first request, then every second, and a last time when it closes."""
    async with worker_by_hand(nats_url, fleet) as worker:
        async with rollbus.connect(nats_url, fleet=fleet, client="me"):
            live = [await worker.presences.get() for _ in range(2)]
        closed = await worker.presences.get()
        while closed.state is ClientState.LIVE:
            closed = await worker.presences.get()
        async with rollbus.connect(nats_url, fleet=fleet, client="me"):
            reborn = await worker.presences.get()

    assert {presence.state for presence in live} == {ClientState.LIVE}
    assert (closed.state, closed.incarnation) == (ClientState.CLOSED, live[0].incarnation)
    assert reborn.incarnation != closed.incarnation


@pytest.mark.proves("P39")
async def test_garbage_on_a_link_is_counted(nats_url: str, fleet: str) -> None:
    """Bytes that are no frame increase a counter and have no other effect."""
    garbage = (b"", b"\xff\xfe", b"\x80", b"{}", b"\x93\x01\x02\x03", bytes(1000))
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(1)))
        key = await worker.next_key()
        for data in garbage:
            await publish(worker.nats, worker.subjects.frame("me", "hand"), data)
        await worker.frame(0, chunk(key, 0, 7, total=1), admitted=(key,))
        await completing
        assert rb.stats().bad_messages == len(garbage)


async def test_frames_that_nats_py_drops_are_counted_and_requested_again(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nats-py drops frames of a full subscription, the client counts them and requests them again."""
    monkeypatch.setattr("rollbus.bus.client.runtime.subscribe", partial(subscribe, max_pending_msgs=3))
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(100)))
        key = await worker.next_key()
        await worker.frame(0, admitted=(key,))
        chunks = [chunk(key, index, index, **({"total": 100} if index == 99 else {})) for index in range(100)]
        # All frames arrive at once, and only a few of them fit into the subscription.
        for number in range(1, 101):
            await worker.frame(number, chunks[number - 1])
        while not (wanted := await worker.next_link()).resend:
            await worker.frame(101)
        while wanted.acked <= 100:
            # Send so few frames at a time that all of them fit.
            upto = min(wanted.acked + 3, 101)
            for number in range(wanted.acked, upto):
                await worker.frame(number, chunks[number - 1])
            wanted = await worker.acked(upto)
        await completing
        stats = rb.stats()

    assert list(completing.result().token_ids) == list(range(100))
    assert completing.result().attempts == 1
    assert stats.dropped_msgs > 50
    assert stats.resends_asked > 0


# A worker that sends tokens or versions which it cannot have fails its requests, and is named.


KEY = RequestKey("r", 0, 0)


async def announced(worker: HandWorker, rb: rollbus.Client, version: int = 0) -> None:
    """Publish presence with a vocabulary of 100 tokens and this version, and wait until the client has received it."""
    worker.reads_siblings, worker.weight_version = True, version
    await worker.announce()
    await rb.fleet.state()


async def failure_of(
    worker: HandWorker, rb: rollbus.Client, number: int, *, tokens: tuple[int, ...], version: int
) -> RequestFailed:
    """Answer a request with these tokens of this version, and return its error. The worker must receive an abort."""
    async with asyncio.TaskGroup() as tasks:
        failing = tasks.create_task(error_of(rb.complete(request(len(tokens))), RequestFailed))
        key = await worker.next_key()
        false = replace(chunk(key, 0, *tokens, total=len(tokens)), weight_version=version)
        await worker.frame(number, false, admitted=(key,))
        error = await failing
        assert await worker.aborted() == [key]
    assert error.code is ErrorCode.PROTOCOL_ERROR
    return error


@pytest.mark.parametrize("tokens", [(7, 100, 7), (-1, 7), (*range(99), 2**31 - 1)])
async def test_tokens_outside_the_vocabulary_fail_their_request_only(
    nats_url: str, fleet: str, tokens: tuple[int, ...]
) -> None:
    """Token ids outside the announced vocabulary fail the request; another request in the same frame completes."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        await announced(worker, rb)
        failing = tasks.create_task(error_of(rb.complete(request(len(tokens))), RequestFailed))
        key = await worker.next_key()
        completing = tasks.create_task(rb.complete(request(1)))
        other = await worker.next_key()
        false, right = chunk(key, 0, *tokens, total=len(tokens)), chunk(other, 0, 99, total=1)
        await worker.frame(0, false, right, admitted=(key, other))
        error, generation = await failing, await completing

    assert error.code is ErrorCode.PROTOCOL_ERROR
    assert "worker hand sent token id" in error.message
    assert "allowed by its vocabulary: 0 to 99" in error.message
    assert generation.token_ids.tolist() == [99]


async def test_a_version_above_the_announced_and_recorded_one_fails(nats_url: str, fleet: str) -> None:
    """A version above presence and record fails the request: else its tokens would never be stale."""
    async with hand_worker(nats_url, fleet) as (worker, rb):
        await announced(worker, rb, version=3)
        error = await failure_of(worker, rb, 0, tokens=(7,), version=MAX_WEIGHT_VERSION)
        await record(nats_url, fleet, 4)
        second = await failure_of(worker, rb, 1, tokens=(7,), version=5)

    assert f"worker hand sent weight version {MAX_WEIGHT_VERSION}; announced and recorded: 3" in error.message
    assert "weight version 5; announced and recorded: 4" in second.message


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the model of each record that is read."""
    reads: list[str] = []
    read = DesiredStore.read

    async def counting(store: DesiredStore, model: str) -> Any:
        reads.append(model)
        return await read(store, model)

    monkeypatch.setattr(DesiredStore, "read", counting)
    return reads


async def test_a_version_that_is_recorded_is_news(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that presence does not have yet is accepted if it is recorded. One read is enough for a frame."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        await announced(worker, rb)
        await record(nats_url, fleet, 4)
        reads = note_reads(monkeypatch)
        completing = [tasks.create_task(rb.complete(request(1))) for _ in range(2)]
        keys = [await worker.next_key() for _ in completing]
        chunks = [replace(chunk(key, 0, 7, total=1), weight_version=4) for key in keys]
        await worker.frame(0, *chunks, admitted=tuple(keys))
        versions = [(await each).weight_versions.tolist() for each in completing]

    assert versions == [[4], [4]]
    assert reads == [MODEL]


async def test_tokens_of_a_version_that_is_rolled_back_are_accepted(nats_url: str, fleet: str) -> None:
    """Tokens that arrive after the presence of a rollback may still be of the version of the tokens before them.

    While the rollback is recent, this holds for the first tokens of a request too.
    """
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        await announced(worker, rb, version=5)
        completing = [tasks.create_task(rb.complete(request(2))) for _ in range(2)]
        key, late = [await worker.next_key() for _ in range(2)]
        await worker.frame(0, replace(chunk(key, 0, 7), weight_version=5), admitted=(key, late))
        await worker.acked(0)
        await announced(worker, rb, version=4)
        await worker.frame(1, replace(chunk(key, 1, 7, total=2), weight_version=5))
        await record(nats_url, fleet, 4, allow_rollback=True)
        await worker.frame(2, replace(chunk(late, 0, 7, 7, total=2), weight_version=5))
        assert [(await each).weight_versions.tolist() for each in completing] == [[5, 5]] * 2


async def test_a_worker_whose_presence_is_late_costs_one_read(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a worker's presence lacks a recorded version, the client reads the record once, and not for each frame."""
    async with hand_worker(nats_url, fleet) as (worker, rb):
        await announced(worker, rb)
        await record(nats_url, fleet, 4)
        reads = note_reads(monkeypatch)
        for number in range(3):
            async with asyncio.TaskGroup() as tasks:
                completing = tasks.create_task(rb.complete(request(1)))
                key = await worker.next_key()
                await worker.frame(number, replace(chunk(key, 0, 7, total=1), weight_version=4), admitted=(key,))
                assert (await completing).weight_versions.tolist() == [4]

    assert reads == [MODEL]


async def test_versions_are_not_checked_while_the_record_cannot_be_read(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If JetStream does not answer, a newer version is accepted, but no token outside the vocabulary."""

    async def fails(_store: DesiredStore, _model: str) -> None:
        raise BusBroken("no answer")

    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        await announced(worker, rb)
        monkeypatch.setattr(DesiredStore, "read", fails)
        completing = tasks.create_task(rb.complete(request(1)))
        key = await worker.next_key()
        await worker.frame(0, replace(chunk(key, 0, 7, total=1), weight_version=4), admitted=(key,))
        generation = await completing
        error = await failure_of(worker, rb, 1, tokens=(100,), version=4)

    assert generation.weight_versions.tolist() == [4]
    assert "token id 100" in error.message


async def record(nats_url: str, fleet: str, version: int, *, allow_rollback: bool = False) -> None:
    """Record a version of the weights."""
    async with opened(nats_url) as nats:
        source = WeightSource(path="/m")
        command = UpdateWeights(id="u", source=source, version=version, allow_rollback=allow_rollback)
        await DesiredStore(nats, Subjects(fleet)).record(MODEL, command)


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 120), max_size=40), max_size=4))
def test_the_check_of_a_frame_equals_the_check_of_each_token(frames: list[list[int]]) -> None:
    """A frame passes exactly if each id of each chunk is in the vocabulary, and the chunk with another id is named."""
    own = presence(capabilities=capabilities())
    chunks = [chunk(KEY, 0, *ids) for ids in frames]
    wrong = [any(not 0 <= token < 100 for token in ids) for ids in frames]

    assert are_within(chunks, own) is not any(wrong)
    assert [problem_of(each, announced_by((own,))) is not None for each in chunks] == wrong


def test_ids_beside_the_sampled_ones_and_versions_of_adapters_are_checked() -> None:
    """Ids of top logprobs and sampling masks, and the version of an adapter, are compared, too."""
    own = presence(capabilities=capabilities(), loras=(LoraInfo(name="a", version=2),))
    ids = np.array([[7, 100]], "<i4").tobytes()
    top = TopLogprobs(2, ids, bytes(8))
    mask = SamplingMask(np.array([2], "<i4").tobytes(), ids)
    right = replace(chunk(KEY, 0, 7), lora_version=2)

    assert are_within([right], own)
    for false in (
        replace(right, top_logprobs=top),
        replace(right, sampling_mask=mask),
        replace(right, lora_version=3),
        replace(right, weight_version=1),
    ):
        assert not are_within([right, false], own)
        assert problem_of(false, announced_by((own,)))
    assert not are_within([right], presence())


# The view of a client on its fleet: workers, queues, and commands of other controllers.


async def test_undecodable_messages_are_counted_and_ignored(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """The client counts messages that do not decode, are too large, or name another worker, but not acks of reads."""
    subjects = Subjects(fleet)
    async with one_worker() as (rb, _, _), opened(nats_url) as nats:
        watch = watch_fleet(rb)
        await watch.listen()
        refused = "1"  # the id that the worker uses when it rejects the unknown command
        worker = rb.fleet.workers[0].worker
        for data in (b"", b"{", b"[]", b"\xff", b'{"command":"pause"}', b'{"command":"x","id":"1"}'):
            await nats.publish(subjects.control("eve"), data)
            await nats.publish(subjects.ack("eve", worker), data)
        forged = b'{"id":"1","command":"pause","worker":"other","incarnation":"","model":"m","status":"applied"}'
        await nats.publish(subjects.ack("eve", worker), forged)
        await nats.publish(subjects.ack("eve", worker), b'{"id":"1","command":"read_experts","experts":' + b"[" * 99)
        await nats.publish(subjects.ack("eve", worker), b"[" * (MAX_ACK_BYTES + 1))
        await nats.publish(subjects.control("eve"), encode_json(Pause(id="p", workers=("nobody",))))
        await nats.flush()
        await until_true(lambda: watch.bad_messages == 14)
        while not (lines := [line for line in await watch.commands() if line.id != refused]):
            pass
    assert [(line.id, line.workers, line.done) for line in lines] == [("p", {}, True)]


async def test_the_watch_contains_only_commands_between_listen_and_unlisten(one_worker: StartServed) -> None:
    """The watch contains only commands that arrived between `listen` and `unlisten`, and retains them afterwards."""
    async with one_worker() as (rb, _, _):
        watch = watch_fleet(rb)
        await rb.fleet.pause()
        await watch.listen()
        await watch.listen()
        heard = await rb.fleet.resume()
        while not (lines := await watch.commands()) or not lines[0].done:
            pass
        await watch.unlisten()
        await rb.fleet.pause()
        assert await watch.commands() == lines
    assert [line.id for line in lines] == [heard.id]
    assert lines[0].counts == {"applied": 1}
