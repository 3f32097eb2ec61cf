"""Client and worker over a real NATS server, with the synthetic engine."""

import asyncio
import gc

import numpy as np
import pytest
from msgspec.structs import replace

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.errors import BusClosed, ErrorCode, NoWorkers, RequestFailed, RequestRejected
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed, check_generation, synthetic_worker, until_idle
from tests.support.hand_worker import chunk, hand_worker, request, worker_by_hand
from tests.support.requests import all_of, greedy, sized
from tests.support.waits import SOON_S, until


async def test_complete_gives_the_whole_result(one_worker: StartServed) -> None:
    """`complete` returns tokens, logprobs, weight versions and routed experts with the lengths of the row rule."""
    async with one_worker(weight_version=3) as (rb, *_):
        request = sized()
        generation = await rb.complete(request)

    check_generation(generation, request)
    assert generation.request is request
    assert generation.finish_reason == "length"
    assert len(generation.token_ids) == 8
    assert set(generation.weight_versions) == {3}
    assert generation.attempts == 1
    assert len(generation.worker_ids) == 1


async def test_streamed_chunks_add_up_to_the_result(one_worker: StartServed) -> None:
    """A stream yields one chunk for each engine step, each with the rows of its tokens.

    Together they equal the result of `complete`.
    """
    async with one_worker() as (rb, *_):
        chunks: list[Chunk] = [chunk async for chunk in rb.generate(sized())]
        whole = await rb.complete(sized())

    assert [chunk.chunk_index for chunk in chunks] == list(range(8))
    assert [chunk.is_terminal for chunk in chunks] == [False] * 7 + [True]
    assert [chunk.num_tokens for chunk in chunks] == [1] * 8
    rows = [chunk.routed_experts.numpy() for chunk in chunks if chunk.routed_experts is not None]
    assert [len(part) for part in rows] == [5] + [1] * 7
    np.testing.assert_array_equal(np.concatenate([chunk.token_ids for chunk in chunks]), whole.token_ids)
    np.testing.assert_array_equal(np.concatenate(rows), whole.routed_experts)


@pytest.mark.proves("P36")
async def test_each_sample_equals_a_request_with_its_own_seed(one_worker: StartServed) -> None:
    """A request with n=3 returns child 0 with two siblings. Child i equals a separate request with seed + i."""
    sampling = SamplingParams(max_tokens=6, seed=40, n=3)
    async with one_worker() as (rb, *_):
        first = await rb.complete(GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling))
        second = await rb.complete(
            GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=6, seed=41))
        )
        streamed = [c async for c in rb.generate(GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling))]

    assert [g.child for g in (first, *first.siblings)] == [0, 1, 2]
    assert {id(g.request) for g in first.siblings} == {id(first.request)}
    np.testing.assert_array_equal(first.siblings[0].token_ids, second.token_ids)
    assert not np.array_equal(first.token_ids, second.token_ids)
    assert sorted(c.child for c in streamed if c.is_terminal) == [0, 1, 2]


@pytest.mark.proves("P45")
async def test_every_request_method_raises_no_workers_without_a_worker(nats_url: str, fleet: str) -> None:
    """Without a worker, every request method raises `NoWorkers` promptly, long before the timeout of the request."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb, asyncio.timeout(SOON_S):
        with pytest.raises(NoWorkers, match="no live worker"):
            await rb.complete(sized(timeout_s=3600))
        with pytest.raises(NoWorkers):
            async for _ in rb.generate(sized()):
                pass
        with pytest.raises(NoWorkers):
            await all_of(rb.complete_many([sized()]))
        with pytest.raises(NoWorkers):
            await all_of(rb.stream_many([sized()]))
        assert (await rb.fleet.state()).workers == ()


@pytest.mark.proves("P27")
async def test_a_rejected_request_affects_no_other_request(one_worker: StartServed) -> None:
    """Requests that the model cannot serve fail without an effect on other requests.

    Each error names the field and the allowed values.
    """
    config = SyntheticConfig(max_model_len=64, vocab_size=100)
    bad = {
        "long": (sized(64, request_id="long"), "prompt_token_ids has 64 tokens; allowed: 1 to 63"),
        "vocab": (GenerateRequest(prompt_token_ids=[5, 100], request_id="vocab"), r"prompt_token_ids\[1\] is 100"),
        "extra": (
            GenerateRequest(prompt_token_ids=[5], request_id="extra", sampling=SamplingParams(extra={"foo": 1})),
            "sampling.extra.foo is unknown to synthetic",
        ),
        "logprobs": (
            GenerateRequest(prompt_token_ids=[5], request_id="logprobs", sampling=SamplingParams(logprobs=21)),
            "sampling.logprobs is 21; allowed: 0 to 20",
        ),
        "lora": (GenerateRequest(prompt_token_ids=[5], request_id="lora", lora="x"), "lora 'x' is not loaded"),
    }
    good = [sized(3, 4, request_id=f"good{i}") for i in range(10)]
    requests = [*good[:5], *(request for request, _ in bad.values()), *good[5:]]
    async with one_worker(config=config) as (rb, *_):
        results = {g.request_id: g async for g in rb.complete_many(requests)}
        for name, (request, message) in bad.items():
            assert results[name].finish_reason == "error"
            assert results[name].request is request
            with pytest.raises(RequestRejected, match=message):
                await rb.complete(request)
    for request in good:
        check_generation(results[request.request_id], request)


@pytest.mark.proves("P28")
async def test_a_model_without_experts_returns_no_routed_experts(one_worker: StartServed) -> None:
    """A model without experts returns None for routed experts, and an error if the request requires them."""
    config = SyntheticConfig(num_experts=0)
    async with one_worker(config=config) as (rb, *_):
        check_generation(await rb.complete(sized()), sized(), routing=False)
        with pytest.raises(RequestRejected, match="no routed experts") as caught:
            await rb.complete(sized(return_routed_experts=True))
        assert caught.value.code is ErrorCode.UNSUPPORTED


async def test_routed_experts_can_be_declined(one_worker: StartServed) -> None:
    """With `return_routed_experts=False`, the result has no routed experts."""
    async with one_worker() as (rb, *_):
        request = sized(return_routed_experts=False)
        check_generation(await rb.complete(request), request, routing=False)


async def test_routed_experts_prompt_start_removes_leading_rows(one_worker: StartServed) -> None:
    """`routed_experts_prompt_start` removes leading rows, possibly all of them.

    The other rows equal those of the full array.
    """
    async with one_worker() as (rb, *_):
        for start, max_tokens in ((0, 1), (3, 1), (5, 1), (5, 4), (4, 4)):
            full = await rb.complete(sized(max_tokens=max_tokens))
            request = sized(max_tokens=max_tokens, routed_experts_prompt_start=start)
            part = await rb.complete(request)
            check_generation(part, request)
            np.testing.assert_array_equal(part.routed_experts, full.routed_experts[start:])


async def test_routed_experts_larger_than_a_message_arrive_whole(one_worker: StartServed) -> None:
    """Routed experts larger than a message arrive whole, with two-byte ids if a model has more than 256 experts."""
    config = SyntheticConfig(num_layers=64, top_k=8, num_experts=300)
    async with one_worker(config=config) as (rb, *_):
        request = sized(20_000, 3)
        generation = await rb.complete(request)
        assert rb.stats().missing_frames == 0

    check_generation(generation, request)
    assert generation.routed_experts.dtype == np.dtype("<u2")
    assert generation.routed_experts.nbytes > 20_000_000
    assert generation.routed_experts.max() == 299


async def test_open_requests_of_a_stopped_worker_fail_with_worker_stopped(nats_url: str, fleet: str) -> None:
    """Without another worker, open requests of a stopped worker fail with `worker_stopped`.

    Later requests raise `NoWorkers`.
    """
    config = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
    async with rollbus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb:
        async with synthetic_worker(nats_url, fleet, config=config) as (worker, _):
            await rb.fleet.wait_for_workers()
            with pytest.raises(RequestFailed, match="worker was stopped") as caught:  # noqa: PT012
                async for chunk in rb.generate(sized(max_tokens=1_000_000)):
                    if chunk.chunk_index == 2:
                        worker.stop()
            assert caught.value.retryable
        with pytest.raises(NoWorkers):
            await rb.complete(sized())


async def test_entering_a_connected_client_is_an_error(nats_url: str, fleet: str) -> None:
    """Entering a connected client raises an error, and the client stays usable."""
    async with synthetic_worker(nats_url, fleet), rollbus.connect(nats_url, fleet=fleet) as rb:
        with pytest.raises(BusClosed, match="already connected"):
            await rb.__aenter__()
        await rb.fleet.wait_for_workers()
        assert (await rb.complete(sized())).finish_reason == "length"


async def test_requests_beyond_the_limit_of_unconfirmed_publications_wait(
    one_worker: StartServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests beyond the limit of unconfirmed publications wait in the client until the server has confirmed others.

    None fails.
    """
    monkeypatch.setattr("rollbus.bus.queue.publisher.MAX_UNANSWERED", 2)
    async with one_worker() as (rb, *_):
        requests = [sized(max_tokens=2) for _ in range(50)]
        results = [result async for result in rb.complete_many(requests, max_in_flight=50)]

    assert [result.error for result in results] == [None] * 50


# The worker and the trace that the caller of a stream sees in each chunk.


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_chunks_name_the_worker_of_their_attempt(nats_url: str, fleet: str) -> None:
    """Each chunk of a resumed stream names the worker that sent it, not the worker that the chunk claims.

    The client sends the trace with each attempt. The caller receives the trace that a chunk contains.
    """
    async with (
        hand_worker(nats_url, fleet) as (first, rb),
        worker_by_hand(nats_url, fleet, "other", pulls=False) as second,
        asyncio.TaskGroup() as tasks,
    ):
        reading = tasks.create_task(all_of(rb.generate(request(3, traceparent=TRACE))))
        taken = await first.take()
        assert taken.request.traceparent == TRACE
        made = replace(chunk(taken.key, 0, 7), worker_id="impostor", traceparent=TRACE)
        await first.frame(0, made, admitted=(taken.key,))
        await first.acked(1)
        await first.announce(WorkerState.STOPPED)
        await second.announce()
        again = await first.take()
        assert (again.key.attempt, again.request.traceparent) == (1, TRACE)
        second.client_incarnation = first.client_incarnation
        made = replace(chunk(again.key, 0, 8), traceparent=TRACE)
        await second.frame(0, made, chunk(again.key, 1, 9, total=2), admitted=(again.key,))
        chunks = await reading

    assert [(c.token_ids.tolist(), c.worker_id, c.traceparent) for c in chunks] == [
        ([7], "hand", TRACE),
        ([8], "other", TRACE),
        ([9], "other", None),
    ]


async def test_a_terminal_chunk_that_the_client_wrote_names_no_worker(nats_url: str, fleet: str) -> None:
    """An aborted stream ends with a chunk that names no worker, because the client wrote it."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(all_of(rb.generate(request(3, request_id="r"))))
        key: RequestKey = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.acked(1)
        await rb.abort(["r"])
        chunks = await reading

    assert [(c.finish_reason, c.worker_id) for c in chunks] == [(None, "hand"), ("abort", None)]


# The client frees the data of a request, which may be megabytes of routed experts, when its caller has the result.


SAMPLED = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=8, n=2, seed=1))


async def num_streams() -> int:
    """Return the number of existing response streams, including garbage. Each stream holds its received chunks."""
    # Compare types: `isinstance` accesses the objects, and objects of some libraries then emit a warning.
    return sum(type(thing) is ResponseStream for thing in gc.get_objects())


async def test_ended_requests_are_freed_without_the_garbage_collector(one_worker: StartServed) -> None:
    """Completed, streamed and abandoned requests leave no response stream, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        async with one_worker() as (rb, *_):
            assert (await rb.complete(SAMPLED)).error is None
            assert [part async for part in rb.generate(SAMPLED)]
            async for _ in rb.generate(SAMPLED):
                break
            assert [result async for result in rb.complete_many([SAMPLED] * 3)]
            await until(num_streams, 0)
    finally:
        gc.enable()


# Two clients with one name: workers serve only the newer client, and the older client fails with the reason.


@pytest.mark.proves("P68")
async def test_the_newer_client_keeps_the_name(nats_url: str, fleet: str) -> None:
    """Open and later requests of the older client fail with the reason, and the newer client is served."""
    config = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
    async with (
        synthetic_worker(nats_url, fleet, config=config) as (_, engine),
        rollbus.connect(nats_url, fleet=fleet, client="same") as older,
    ):
        await older.fleet.wait_for_workers()
        stream = older.generate(greedy(1, 1_000_000))
        await anext(stream)
        async with rollbus.connect(nats_url, fleet=fleet, client="same") as younger, asyncio.timeout(SOON_S):
            await younger.fleet.wait_for_workers()
            with pytest.raises(RequestFailed, match="another client with the name same") as caught:
                async for _ in stream:
                    pass
            assert caught.value.code is ErrorCode.CLIENT_CLOSED
            with pytest.raises(RequestFailed, match="client names must be unique"):
                await older.complete(greedy(1, 1))
            assert (await younger.complete(greedy(1, 5))).finish_reason == "length"
            await until_idle(engine, younger)
