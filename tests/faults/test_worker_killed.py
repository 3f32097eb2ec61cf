"""If a worker is killed or stopped, another worker completes its requests, and the results do not change."""

import asyncio
import contextlib

import numpy as np
import numpy.typing as npt
import pytest

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.schemas.errors import ErrorCode, RequestFailed
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE, undisturbed
from tests.support.disagg import role_of, until_paired
from tests.support.invariants import check_stream, observing
from tests.support.load import Load
from tests.support.patience import SOON_S
from tests.support.requests import greedy
from tests.support.worker_process import LASTING, worker_process

LEASE = ("--lease-s", "2")
ENGINE_ARGS = {"step_s": 0.003, "max_num_seqs": 16, "vocab_size": VOCAB_SIZE}
SLOW = {"step_s": 0.005, "max_model_len": 10_000_000}


async def undisturbed_tokens(request: GenerateRequest) -> npt.NDArray[np.int32]:
    """Return the tokens of the request on a separate engine."""
    expected = await undisturbed([request], SyntheticConfig.from_args(SLOW))
    return expected[request.request_id].token_ids


@pytest.mark.proves("P2")
async def test_another_worker_finishes_the_requests_of_a_killed_worker(nats_url: str, fleet: str) -> None:
    """If one of two workers is killed under load, every request completes once and equals the undisturbed one."""
    load = await Load.lasting(80, SyntheticConfig.from_args(ENGINE_ARGS))
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "a", engine_args=ENGINE_ARGS) as doomed,
        worker_process(nats_url, fleet, *LASTING, "--worker-id", "b", engine_args=ENGINE_ARGS),
    ):
        await rb.fleet.wait_for_workers(2)

        async def kill() -> None:
            doomed.kill()

        results = await load.run(rb, strikes={10: kill})
        resumed = [generation for generation in results if generation.attempts > 1]
        assert resumed
        assert {generation.worker_ids[-1] for generation in resumed} == {"b"}
        assert all(generation.exact for generation in results)
        await observer.check_at_rest()


@pytest.mark.proves("P2", "P53")
@pytest.mark.parametrize("workers", [("a", "b"), ("p", "d1", "d2")])
async def test_another_worker_continues_the_stream_of_a_killed_worker(
    nats_url: str, fleet: str, workers: tuple[str, ...]
) -> None:
    """If a worker is killed during a stream, another worker continues the stream with undisturbed tokens.

    With a prefill worker, each attempt has two phases.
    """
    wanted = greedy(5, 200, request_id="r")
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2) as rb,
        contextlib.AsyncExitStack() as stack,
    ):
        processes = {}
        for name in workers:
            options = (*LEASE, "--worker-id", name, "--role", role_of(name))
            process = worker_process(nats_url, fleet, *options, engine_args={**SLOW, "role": role_of(name)})
            processes[name] = await stack.enter_async_context(process)
        await until_paired(rb, *workers)
        stream = rb.generate(wanted)
        # The second phase has a chunk too.
        chunks = [await anext(stream), await anext(stream)]
        killed = chunks[-1].worker_id
        assert killed is not None
        processes[killed].kill()
        chunks += [chunk async for chunk in stream]
        await observer.check_at_rest()

    check_stream(chunks, wanted)
    *before, one, other = workers
    served = (*before, killed, *before, other if killed == one else one)
    # In chunks, each phase has its own attempt number.
    assert list(dict.fromkeys((chunk.attempt, chunk.worker_id) for chunk in chunks)) == list(enumerate(served))
    np.testing.assert_array_equal(
        np.concatenate([chunk.token_ids for chunk in chunks]), await undisturbed_tokens(wanted)
    )


@pytest.mark.proves("P70")
async def test_another_worker_continues_the_streams_of_a_stopped_worker(nats_url: str, fleet: str) -> None:
    """After SIGTERM the process exits with 0, and another worker continues its streams with the next token."""
    wanted = greedy(5, 200, request_id="r")
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, "--worker-id", "a", engine_args=SLOW) as a,
        worker_process(nats_url, fleet, "--worker-id", "b", engine_args=SLOW) as b,
    ):
        await rb.fleet.wait_for_workers(2)
        stream = rb.generate(wanted)
        chunks = [await anext(stream)]
        process = {"a": a, "b": b}[str(chunks[0].worker_id)]
        process.terminate()
        chunks += [chunk async for chunk in stream]
        async with asyncio.timeout(SOON_S):
            assert await process.wait() == 0

    assert [chunk.chunk_index for chunk in chunks] == list(range(200))
    assert {chunk.attempt for chunk in chunks} == {0, 1}
    np.testing.assert_array_equal(
        np.concatenate([chunk.token_ids for chunk in chunks]), await undisturbed_tokens(wanted)
    )


@pytest.mark.proves("P1", "P71")
async def test_a_dead_engine_ends_the_worker_process(nats_url: str, fleet: str) -> None:
    """If the engine dies, open requests fail with `engine_dead`, and the process exits with a non-zero code."""
    async with (
        rollbus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb,
        worker_process(nats_url, fleet, engine_args={"die_after_steps": 20}) as process,
    ):
        await rb.fleet.wait_for_workers()
        with pytest.raises(RequestFailed) as caught:
            await rb.complete(GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=100, seed=1)))

        assert caught.value.code is ErrorCode.ENGINE_DEAD
        async with asyncio.timeout(SOON_S):
            assert await process.wait() == 1
