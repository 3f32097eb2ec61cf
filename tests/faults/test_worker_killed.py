"""A worker goes away, with or without a word: another finishes what it had, and nobody notices in the result."""

import asyncio

import numpy as np
import pytest

import bus
from bus import GenerateRequest, Generation, SamplingParams
from schemas.errors import ErrorCode, NoWorkers, RequestFailed
from tests.support.fleet import check_generation
from tests.support.worker_process import worker_process

pytestmark = pytest.mark.slow

SLOW = {"step_s": 0.005, "max_model_len": 10_000_000}


def endless() -> GenerateRequest:
    """A request that runs until somebody stops it."""
    return GenerateRequest(
        prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=1_000_000, temperature=0, ignore_eos=True)
    )


async def test_without_another_worker_a_request_fails_as_worker_lost(nats_url: str, fleet: str) -> None:
    """Killed midway and nobody else there: after the grace time the stream fails as `worker_lost`."""
    async with (
        bus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb,
        worker_process(nats_url, fleet, engine_args=SLOW) as process,
    ):
        await rb.fleet.wait_for_workers()
        received = 0
        with pytest.raises(RequestFailed, match="its lease expired") as caught:  # noqa: PT012
            async for chunk in rb.generate(endless()):
                received += chunk.num_tokens
                if received == 10:
                    process.kill()

        assert received >= 10
        assert caught.value.code is ErrorCode.WORKER_LOST
        assert caught.value.retryable
        with pytest.raises(NoWorkers):
            await rb.complete(endless())


async def test_what_a_killed_worker_had_is_finished_by_another(nats_url: str, fleet: str) -> None:
    """Of two workers one is killed under load: every request comes back once, equal to the same one undisturbed."""
    pace = {"step_s": 0.005, "max_num_seqs": 64}
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, "--worker-id", "a", engine_args=pace) as doomed,
        worker_process(nats_url, fleet, "--worker-id", "b", engine_args=pace),
    ):
        await rb.fleet.wait_for_workers(2)
        requests = [request(i, seed) for i in range(30) for seed in (None, 7)]
        stream = rb.generate(endless())
        results: dict[str, Generation] = {}
        async for generation in rb.complete_many([*requests, request(99, None, max_tokens=1)]):
            if not results:
                # The shortest request is done, and all others are under way.
                doomed.kill()
            results[generation.request_id] = generation
        await stream.aclose()

        assert len(results) == 61
        resumed = [generation for generation in results.values() if generation.attempts > 1]
        assert resumed
        assert {generation.worker_ids[-1] for generation in resumed} == {"b"}
        undisturbed = {generation.request_id: generation async for generation in rb.complete_many(requests)}
        for original in requests:
            disturbed, alone = results[original.request_id], undisturbed[original.request_id]
            check_generation(disturbed, original)
            assert disturbed.exact
            np.testing.assert_array_equal(disturbed.token_ids, alone.token_ids)
            np.testing.assert_array_equal(disturbed.logprobs, alone.logprobs)
            np.testing.assert_array_equal(disturbed.routed_experts, alone.routed_experts)


def request(prompt: int, seed: int | None, max_tokens: int = 200) -> GenerateRequest:
    """A greedy or seeded request that does not end early."""
    temperature = 0 if seed is None else 1
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=[prompt + 1, prompt + 2], sampling=sampling)


async def test_a_stopped_worker_hands_over(nats_url: str, fleet: str) -> None:
    """SIGTERM: the process exits with 0, and another worker goes on with its streams at once, token by token."""
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, "--worker-id", "a", engine_args=SLOW) as process,
    ):
        await rb.fleet.wait_for_workers()
        stream = rb.generate(request(5, None, max_tokens=100))
        chunks = [await anext(stream)]
        async with worker_process(nats_url, fleet, "--worker-id", "b", engine_args=SLOW):
            await rb.fleet.wait_for_workers(2)
            process.terminate()
            chunks += [chunk async for chunk in stream]
            async with asyncio.timeout(20):
                assert await process.wait() == 0
            alone = await rb.complete(request(5, None, max_tokens=100))

    assert [chunk.chunk_index for chunk in chunks] == list(range(100))
    assert {chunk.attempt for chunk in chunks} == {0, 1}
    np.testing.assert_array_equal(np.concatenate([chunk.token_ids for chunk in chunks]), alone.token_ids)


async def test_a_dead_engine_ends_the_process(nats_url: str, fleet: str) -> None:
    """When the engine dies, open requests fail as `engine_dead` and the process exits with a non-zero code."""
    async with (
        bus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb,
        worker_process(nats_url, fleet, engine_args={"die_after_steps": 20}) as process,
    ):
        await rb.fleet.wait_for_workers()
        with pytest.raises(RequestFailed) as caught:
            await rb.complete(GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=100, seed=1)))

        assert caught.value.code is ErrorCode.ENGINE_DEAD
        async with asyncio.timeout(20):
            assert await process.wait() == 1


async def test_a_request_that_kills_engines_is_not_passed_on_for_ever(nats_url: str, fleet: str) -> None:
    """After the second engine that died under it, a request is poison: the third worker never sees it."""
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, engine_args={"die_after_steps": 3}),
        worker_process(nats_url, fleet, engine_args={"die_after_steps": 3}),
        worker_process(nats_url, fleet, engine_args={"die_after_steps": 3}) as third,
    ):
        await rb.fleet.wait_for_workers(3)
        with pytest.raises(RequestFailed, match="2 engines died") as caught:
            await rb.complete(request(1, None))

        assert caught.value.code is ErrorCode.POISON_REQUEST
        assert not caught.value.retryable
        alive = (await rb.fleet.state()).workers
        assert len(alive) == 1
    assert third.returncode is not None
