"""Client and worker over a real NATS server, on the synthetic engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import nats
import numpy as np
import pytest

import bus
from bus import GenerateRequest, SamplingParams
from bus.subjects import Subjects
from schemas.chunk import Chunk
from schemas.errors import (
    BusClosed,
    EngineDead,
    ErrorCode,
    InvalidRequest,
    NoWorkers,
    RequestFailed,
    RequestRejected,
)
from tests.support.fleet import check_generation, synthetic_worker
from workers.config import WorkerConfig
from workers.engines.synthetic import SyntheticConfig, SyntheticEngine
from workers.worker import Worker

E = TypeVar("E", bound=Exception)


def greedy(prompt_len: int = 5, max_tokens: int = 8, **fields: object) -> GenerateRequest:
    """A greedy request that does not end early."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=range(prompt_len), sampling=sampling, **fields)  # type: ignore[arg-type]


async def test_complete_gives_the_whole_result(nats_url: str, fleet: str) -> None:
    """A request comes back with tokens, logprobs, versions and routing of the lengths that the row rule says."""
    async with synthetic_worker(nats_url, fleet, weight_version=3), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        request = greedy()
        generation = await rb.complete(request)

    check_generation(generation, request)
    assert generation.finish_reason == "length"
    assert len(generation.token_ids) == 8
    assert set(generation.weight_versions) == {3}
    assert generation.attempts == 1
    assert len(generation.worker_ids) == 1


async def test_streamed_chunks_add_up_to_the_result(nats_url: str, fleet: str) -> None:
    """Chunks come one engine step at a time, each with the rows of its tokens, and add up to what `complete` gives."""
    async with synthetic_worker(nats_url, fleet), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        chunks: list[Chunk] = [chunk async for chunk in rb.generate(greedy())]
        whole = await rb.complete(greedy())

    assert [chunk.chunk_index for chunk in chunks] == list(range(8))
    assert [chunk.is_terminal for chunk in chunks] == [False] * 7 + [True]
    assert [chunk.num_tokens for chunk in chunks] == [1] * 8
    rows = [chunk.routed_experts.numpy() for chunk in chunks if chunk.routed_experts is not None]
    assert [len(part) for part in rows] == [5] + [1] * 7
    np.testing.assert_array_equal(np.concatenate([chunk.token_ids for chunk in chunks]), whole.token_ids)
    np.testing.assert_array_equal(np.concatenate(rows), whole.routed_experts)


@pytest.mark.slow
async def test_many_requests_at_once_equal_each_alone(nats_url: str, fleet: str) -> None:
    """500 requests of mixed lengths at once: every one comes back once and equals the same request run alone."""
    config = SyntheticConfig(max_num_seqs=64)
    requests = [greedy(1 + i % 37, 1 + i % 11, request_id=f"r{i}") for i in range(500)]
    async with synthetic_worker(nats_url, fleet, config=config), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        results = {g.request_id: g async for g in rb.complete_many(requests, max_in_flight=500)}
        assert len(results) == 500
        for request in requests[::25]:
            alone = await rb.complete(request)
            np.testing.assert_array_equal(results[request.request_id].token_ids, alone.token_ids)
            np.testing.assert_array_equal(results[request.request_id].routed_experts, alone.routed_experts)
        assert rb.stats().missing_frames == 0
    for request in requests:
        check_generation(results[request.request_id], request)


async def test_samples_of_one_prompt(nats_url: str, fleet: str) -> None:
    """n=3 gives child 0 with two siblings; child i equals a request of its own with seed + i."""
    sampling = SamplingParams(max_tokens=6, seed=40, n=3)
    async with synthetic_worker(nats_url, fleet), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        first = await rb.complete(GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling))
        second = await rb.complete(
            GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=6, seed=41))
        )
        streamed = [c async for c in rb.generate(GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling))]

    assert [g.child for g in (first, *first.siblings)] == [0, 1, 2]
    np.testing.assert_array_equal(first.siblings[0].token_ids, second.token_ids)
    assert not np.array_equal(first.token_ids, second.token_ids)
    assert sorted(c.child for c in streamed if c.is_terminal) == [0, 1, 2]


@pytest.mark.slow
async def test_no_workers_is_an_answer(nats_url: str, fleet: str) -> None:
    """Without a worker every way of asking raises `NoWorkers` at once, long before the request's own timeout."""
    async with bus.connect(nats_url, fleet=fleet) as rb, asyncio.timeout(30):
        with pytest.raises(NoWorkers, match="no live worker"):
            await rb.complete(greedy(timeout_s=3600))
        with pytest.raises(NoWorkers):
            async for _ in rb.generate(greedy()):
                pass
        with pytest.raises(NoWorkers):
            async for _ in rb.complete_many([greedy()]):
                pass
        assert (await rb.fleet.state()).workers == ()


@pytest.mark.slow
async def test_an_unknown_model_names_the_known_ones(nats_url: str, fleet: str) -> None:
    """A wrong model name is a clear error, and a fleet of several models wants to be told which."""
    async with (
        synthetic_worker(nats_url, fleet, model="org/a.b"),
        synthetic_worker(nats_url, fleet, model="c"),
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(2)
        with pytest.raises(InvalidRequest, match=r"model is 'd'; allowed: one of c, org/a.b"):
            await rb.complete(greedy(model="d"))
        with pytest.raises(InvalidRequest, match="model is missing"):
            await rb.complete(greedy())
        assert (await rb.complete(greedy(model="org/a.b"))).finish_reason == "length"


async def test_a_refused_request_harms_no_other(nats_url: str, fleet: str) -> None:
    """Among good requests, those that the model cannot serve fail alone, each with the field and what is allowed."""
    config = SyntheticConfig(max_model_len=64, vocab_size=100)
    bad = {
        "long": (greedy(64, request_id="long"), "prompt_token_ids has 64 tokens; allowed: 1 to 63"),
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
    good = [greedy(3, 4, request_id=f"good{i}") for i in range(10)]
    requests = [*good[:5], *(request for request, _ in bad.values()), *good[5:]]
    async with synthetic_worker(nats_url, fleet, config=config), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        results = {g.request_id: g async for g in rb.complete_many(requests)}
        for name, (request, message) in bad.items():
            assert results[name].finish_reason == "error"
            with pytest.raises(RequestRejected, match=message):
                await rb.complete(request)
    for request in good:
        check_generation(results[request.request_id], request)


async def test_routing_where_there_is_none(nats_url: str, fleet: str) -> None:
    """A model without experts returns None for routing, and a clear error when routing is demanded."""
    config = SyntheticConfig(num_experts=0)
    async with synthetic_worker(nats_url, fleet, config=config), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        check_generation(await rb.complete(greedy()), greedy(), routing=False)
        with pytest.raises(RequestRejected, match="no experts") as caught:
            await rb.complete(greedy(return_routed_experts=True))
        assert caught.value.code is ErrorCode.UNSUPPORTED


async def test_routing_can_be_declined(nats_url: str, fleet: str) -> None:
    """`return_routed_experts=False` spares the bytes."""
    async with synthetic_worker(nats_url, fleet), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        request = greedy(return_routed_experts=False)
        check_generation(await rb.complete(request), request, routing=False)


@pytest.mark.parametrize(("start", "max_tokens"), [(0, 1), (3, 1), (5, 1), (5, 4), (4, 4)])
async def test_the_start_of_routing(nats_url: str, fleet: str, start: int, max_tokens: int) -> None:
    """`routed_experts_prompt_start` drops leading rows, down to none, and the rest equal the full array's."""
    async with synthetic_worker(nats_url, fleet), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        full = await rb.complete(greedy(max_tokens=max_tokens))
        request = greedy(max_tokens=max_tokens, routed_experts_prompt_start=start)
        part = await rb.complete(request)

    check_generation(part, request)
    assert full.routed_experts is not None
    np.testing.assert_array_equal(part.routed_experts, full.routed_experts[start:])


@pytest.mark.slow
async def test_routing_larger_than_a_message_is_split(nats_url: str, fleet: str) -> None:
    """Routing of many times a part arrives whole, with two-byte ids where a model has more than 256 experts."""
    config = SyntheticConfig(num_layers=64, top_k=8, num_experts=300)
    async with synthetic_worker(nats_url, fleet, config=config), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        request = greedy(20_000, 3)
        generation = await rb.complete(request)
        assert rb.stats().missing_frames == 0

    check_generation(generation, request)
    assert generation.routed_experts is not None
    assert generation.routed_experts.dtype == np.dtype("<u2")
    assert generation.routed_experts.nbytes > 20_000_000
    assert generation.routed_experts.max() == 299


@pytest.mark.slow
async def test_engine_death_is_told_to_every_open_request(nats_url: str, fleet: str) -> None:
    """When the only engine dies every open request fails with `engine_dead`, and the worker ends with that error."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    engine = SyntheticEngine(config)
    worker = Worker(WorkerConfig(nats_url=nats_url, fleet=fleet, model="m"), engine)
    async with bus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(expect(EngineDead, worker.run()))
        await rb.fleet.wait_for_workers()
        failing = [
            tasks.create_task(expect(RequestFailed, rb.complete(greedy(max_tokens=1_000_000)))) for _ in range(5)
        ]
        stream = rb.generate(greedy(max_tokens=1_000_000))
        while worker.presence().in_flight < 6:
            await anext(stream)
        engine.kill()
        with pytest.raises(RequestFailed, match="the engine died: killed"):
            await exhaust(stream)

    assert [task.result().code for task in failing] == [ErrorCode.ENGINE_DEAD] * 5
    assert str(running.result()) == "killed"
    assert worker.presence().state == "failed"


async def exhaust(stream: AsyncIterator[object]) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


async def expect(kind: type[E], awaitable: Awaitable[object]) -> E:
    """Await what must fail, and return its error."""
    with pytest.raises(kind) as caught:
        await awaitable
    return caught.value


@pytest.mark.slow
async def test_a_worker_that_stops_says_so(nats_url: str, fleet: str) -> None:
    """Where no other comes up, open requests of a worker that is stopped fail as `worker_stopped`; then it is gone."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with bus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb:
        async with synthetic_worker(nats_url, fleet, config=config) as (worker, _):
            await rb.fleet.wait_for_workers()
            with pytest.raises(RequestFailed, match="worker was stopped") as caught:  # noqa: PT012
                async for chunk in rb.generate(greedy(max_tokens=1_000_000)):
                    if chunk.chunk_index == 2:
                        worker.stop()
            assert caught.value.retryable
        with pytest.raises(NoWorkers):
            await rb.complete(greedy())


async def test_garbage_is_counted_and_ignored(nats_url: str, fleet: str) -> None:
    """Bytes that are no message, on any subject, harm neither worker nor client."""
    subjects = Subjects(fleet)
    async with (
        synthetic_worker(nats_url, fleet) as (worker, _),
        bus.connect(nats_url, fleet=fleet, client="me") as rb,
    ):
        await rb.fleet.wait_for_workers()
        raw = await nats.connect(nats_url)
        worker_id = worker.presence().worker
        for garbage in (b"", b"\xff\xfe", b"\x80", b"{}", b"\x93\x01\x02\x03", bytes(1000)):
            await raw.publish(subjects.request("me", "synthetic", "normal"), garbage)
            await raw.publish(subjects.link("me", worker_id), garbage)
            await raw.publish(subjects.frame("me", worker_id), garbage)
            await raw.publish(subjects.presence("me"), garbage)
        await raw.drain()
        assert (await rb.complete(greedy())).finish_reason == "length"
        assert worker.stats().bad_messages + worker.stats().intake.bad >= 6
        assert rb.stats().bad_messages == 6
        assert rb.fleet.bad_messages == 6


async def test_a_client_is_entered_once(nats_url: str, fleet: str) -> None:
    """Entering a client that is entered already is refused, and harms it not."""
    async with synthetic_worker(nats_url, fleet), bus.connect(nats_url, fleet=fleet) as rb:
        with pytest.raises(BusClosed, match="entered already"):
            await rb.__aenter__()
        await rb.fleet.wait_for_workers()
        assert (await rb.complete(greedy())).finish_reason == "length"


async def test_more_requests_at_once_than_may_wait_for_the_server_take_turns(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in the client until the server has answered for others; none is refused."""
    monkeypatch.setattr("bus.queue.publisher.MAX_UNANSWERED", 2)
    async with synthetic_worker(nats_url, fleet), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        requests = [greedy(max_tokens=2) for _ in range(50)]
        results = [result async for result in rb.complete_many(requests, max_in_flight=50)]

    assert [result.error for result in results] == [None] * 50
