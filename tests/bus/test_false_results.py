"""A worker that sends tokens or versions which it cannot have fails its requests, and is named."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import rollbus
from rollbus import RequestFailed
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.stream.verification import announced_by, are_within, problem_of
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import SamplingMask, TopLogprobs
from rollbus.schemas.control import UpdateWeights
from rollbus.schemas.errors import BusBroken, ErrorCode
from rollbus.schemas.limits import MAX_WEIGHT_VERSION
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.presence import LoraInfo
from rollbus.schemas.weights import WeightSource
from tests.support.connections import opened
from tests.support.hand_worker import MODEL, HandWorker, chunk, hand_worker, request
from tests.support.outcomes import error_of
from tests.support.presences import capabilities, presence

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


async def test_a_version_that_is_recorded_is_news(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that presence does not have yet is accepted if it is recorded. One read is enough for a frame."""
    reads: list[str] = []
    read = DesiredStore.read

    async def counting(store: DesiredStore, model: str) -> Any:
        reads.append(model)
        return await read(store, model)

    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        await announced(worker, rb)
        await record(nats_url, fleet, 4)
        monkeypatch.setattr(DesiredStore, "read", counting)
        completing = [tasks.create_task(rb.complete(request(1))) for _ in range(2)]
        keys = [await worker.next_key() for _ in completing]
        chunks = [replace(chunk(key, 0, 7, total=1), weight_version=4) for key in keys]
        await worker.frame(0, *chunks, admitted=tuple(keys))
        versions = [(await each).weight_versions.tolist() for each in completing]

    assert versions == [[4], [4]]
    assert reads == [MODEL]


async def test_tokens_of_a_version_that_is_rolled_back_are_accepted(nats_url: str, fleet: str) -> None:
    """Tokens that arrive after the presence of a rollback may still be of the version of the tokens before them."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        await announced(worker, rb, version=5)
        completing = tasks.create_task(rb.complete(request(2)))
        key = await worker.next_key()
        await worker.frame(0, replace(chunk(key, 0, 7), weight_version=5), admitted=(key,))
        await worker.acked(0)
        await announced(worker, rb, version=4)
        await worker.frame(1, replace(chunk(key, 1, 7, total=2), weight_version=5))
        assert (await completing).weight_versions.tolist() == [5, 5]


async def test_a_worker_whose_presence_is_late_costs_one_read(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a worker's presence lacks a recorded version, the client reads the record once, and not for each frame."""
    reads: list[str] = []
    read = DesiredStore.read

    async def counting(store: DesiredStore, model: str) -> Any:
        reads.append(model)
        return await read(store, model)

    async with hand_worker(nats_url, fleet) as (worker, rb):
        await announced(worker, rb)
        await record(nats_url, fleet, 4)
        monkeypatch.setattr(DesiredStore, "read", counting)
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


async def record(nats_url: str, fleet: str, version: int) -> None:
    """Record a version of the weights."""
    async with opened(nats_url) as nats:
        command = UpdateWeights(id="u", source=WeightSource(path="/m"), version=version)
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
