"""A worker that is killed without a word: its requests fail clearly, those of others go on."""

import asyncio

import pytest

import bus
from bus import GenerateRequest, SamplingParams
from schemas.errors import ErrorCode, NoWorkers, RequestFailed
from tests.support.worker_process import worker_process

SLOW = {"step_s": 0.005, "max_model_len": 10_000_000}


def endless() -> GenerateRequest:
    """A request that runs until somebody stops it."""
    return GenerateRequest(
        prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=1_000_000, temperature=0, ignore_eos=True)
    )


async def test_requests_of_a_killed_worker_fail_as_worker_lost(nats_url: str, fleet: str) -> None:
    """Kill -9 midway through a stream: the stream fails as `worker_lost`, may be retried, and the fleet is empty."""
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
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


async def test_requests_at_the_other_worker_go_on(nats_url: str, fleet: str) -> None:
    """Of many requests on two workers, one of them killed, each either finishes whole or fails as `worker_lost`."""
    pace = {"step_s": 0.005, "max_num_seqs": 64}
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, "--worker-id", "a", engine_args=pace) as doomed,
        worker_process(nats_url, fleet, "--worker-id", "b", engine_args=pace),
    ):
        await rb.fleet.wait_for_workers(2)
        sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        requests = [GenerateRequest(prompt_token_ids=[i + 1], sampling=sampling) for i in range(60)]
        stream = rb.generate(endless())
        await anext(stream)
        doomed.kill()
        results = [generation async for generation in rb.complete_many(requests)]
        await stream.aclose()

    assert len({generation.request_id for generation in results}) == 60
    finished = [generation for generation in results if generation.error is None]
    lost = [generation.error for generation in results if generation.error is not None]
    assert finished
    assert {len(generation.token_ids) for generation in finished} == {200}
    assert {error.code for error in lost} <= {ErrorCode.WORKER_LOST}


async def test_a_stopped_process_ends_in_order(nats_url: str, fleet: str) -> None:
    """SIGTERM: open requests fail as `worker_stopped` at once, and the process exits with 0."""
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, engine_args=SLOW) as process,
    ):
        await rb.fleet.wait_for_workers()
        stream = rb.generate(endless())
        await anext(stream)
        process.terminate()
        with pytest.raises(RequestFailed) as caught:
            async for _ in stream:
                pass

        assert caught.value.code is ErrorCode.WORKER_STOPPED
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def test_a_dead_engine_ends_the_process(nats_url: str, fleet: str) -> None:
    """When the engine dies, open requests fail as `engine_dead` and the process exits with a non-zero code."""
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, engine_args={"die_after_steps": 20}) as process,
    ):
        await rb.fleet.wait_for_workers()
        with pytest.raises(RequestFailed) as caught:
            await rb.complete(GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=100, seed=1)))

        assert caught.value.code is ErrorCode.ENGINE_DEAD
        async with asyncio.timeout(20):
            assert await process.wait() == 1
