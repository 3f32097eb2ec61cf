"""If a worker is killed or stopped, another worker completes its requests, and the results do not change."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.queue import streams
from rollbus.bus.queue.streams import QueueLimits
from rollbus.schemas.errors import ErrorCode, RequestFailed
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE, undisturbed
from tests.support.disagg import SHAPES, check_legs, role_of, role_worker, until_paired
from tests.support.fleet import until_worker
from tests.support.invariants import check_stream, observing
from tests.support.processes import LASTING, worker_process
from tests.support.requests import Load, Strike, greedy
from tests.support.tcp_proxy import Direction, tcp_proxy
from tests.support.waits import SOON_S, until, until_true

LEASE = ("--lease-s", "2")
ENGINE_ARGS = {"step_s": 0.009, "max_num_seqs": 16, "vocab_size": VOCAB_SIZE}
SLOW = {"step_s": 0.005, "max_model_len": 10_000_000}


async def undisturbed_tokens(request: GenerateRequest) -> npt.NDArray[np.int32]:
    """Return the tokens of the request on a separate engine."""
    expected = await undisturbed([request], SyntheticConfig.from_args(SLOW))
    return expected[request.request_id].token_ids


@pytest.mark.proves("P2", "P53")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("workers", [("a", "b"), ("p", "d1", "d2")])
async def test_another_worker_continues_the_stream_of_a_killed_worker(
    nats_url: str, fleet: str, workers: tuple[str, ...]
) -> None:
    """If a worker is killed during a stream, another worker continues the stream with undisturbed tokens.

    With a prefill worker, each attempt has two phases.
    """
    wanted = greedy(5, 200, request_id="r")
    *before, killed, other = workers
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2) as rb,
        contextlib.AsyncExitStack() as stack,
    ):

        async def start(name: str) -> Process:
            options = (*(LEASE if name == killed else LASTING), "--worker-id", name, "--role", role_of(name))
            process = worker_process(nats_url, fleet, *options, engine_args={**SLOW, "role": role_of(name)})
            return await stack.enter_async_context(process)

        for name in before:
            await start(name)
        process = await start(killed)
        await until_paired(rb, *before, killed)
        stream = rb.generate(wanted)
        # The second phase has a chunk too.
        chunks = [await anext(stream), await anext(stream)]
        process.kill()
        await start(other)
        chunks += [chunk async for chunk in stream]
        await observer.check_at_rest()

    check_stream(chunks, wanted)
    served = (*before, killed, *before, other)
    # In chunks, each phase has its own attempt number.
    assert list(dict.fromkeys((chunk.attempt, chunk.worker_id) for chunk in chunks)) == list(enumerate(served))
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


# If a worker is frozen for longer than its lease, its requests run elsewhere, and its incarnation ends.


@pytest.mark.proves("P2")
async def test_a_frozen_worker_gets_a_new_incarnation(nats_url: str, fleet: str) -> None:
    """A worker that is frozen under load and continues later gets a new incarnation and serves again.

    Every result is right.
    """
    load = await Load.lasting(80, SyntheticConfig.from_args(ENGINE_ARGS))
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "a", engine_args=ENGINE_ARGS) as a,
        worker_process(nats_url, fleet, *LASTING, "--worker-id", "b", engine_args=ENGINE_ARGS) as b,
    ):
        await rb.fleet.wait_for_workers(2)
        life = (await observer.presences())["a"].incarnation

        async def stop() -> None:
            a.send_signal(signal.SIGSTOP)

        results = await load.run(rb, strikes={10: stop})
        resumed = [generation for generation in results if generation.attempts > 1]
        assert resumed
        assert {generation.worker_ids[-1] for generation in resumed} == {"b"}

        a.send_signal(signal.SIGCONT)
        # The client marked the frozen worker lost. Its presence from before the freeze may arrive now.
        await until_worker(rb, "a", lambda worker: worker.incarnation != life and worker.state is WorkerState.SERVING)
        await observer.check_at_rest()
        b.terminate()
        assert await b.wait() == 0
        await until(observer.workers, {"a"})
        again = await Load(load.requests[8:28], load.expected).run(rb)
        assert {generation.worker_ids for generation in again if generation.attempts == 1} == {("a",)}
        await observer.check_at_rest()


# Workers join and leave in order while requests run: each serves some requests, and the results do not change.


CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=8, vocab_size=VOCAB_SIZE)
PREFILL = replace(CONFIG, step_s=0.05)
"""Slow, so that a worker that leaves has requests to hand over."""


@pytest.mark.usefixtures("unhurried")
async def test_results_stay_exact_while_workers_of_both_roles_join_and_leave(nats_url: str, fleet: str) -> None:
    """If two workers of each role take turns, requests have two phases while both roles are present, and otherwise one.

    Requests at a leaving worker continue immediately, with two phases if possible.
    """
    load = await Load.mixed(150, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        contextlib.AsyncExitStack() as stack,
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2) as rb,
    ):
        workers: dict[str, contextlib.AsyncExitStack] = {}

        async def join(name: str) -> None:
            workers[name] = await stack.enter_async_context(contextlib.AsyncExitStack())
            config = PREFILL if role_of(name) == "prefill" else CONFIG
            await workers[name].enter_async_context(role_worker(nats_url, fleet, name, config))

        await join("d1")
        await rb.fleet.wait_for_workers()
        strikes: dict[int, Strike] = {
            10: lambda: join("p1"),
            40: lambda: join("d2"),
            60: lambda: workers["d1"].aclose(),  # noqa: PLW0108 - it has not joined yet
            80: lambda: join("p2"),
            100: lambda: workers["p1"].aclose(),  # noqa: PLW0108
        }
        # Few requests at a time, because the client decides about the phases when it sends a request.
        results = await load.run(rb, strikes=strikes, max_in_flight=24, legs=2)

        check_legs(results, "disaggregated")
        assert {name for generation in results for name in generation.worker_ids} == {"d1", "d2", "p1", "p2"}
        assert max(generation.attempts for generation in results) in {2, 3}
        await observer.check_at_rest()


# If a worker has accepted a request and its offer never reaches the client, the queue delivers the request again.


OFFER_LOST_CONFIG = SyntheticConfig(step_s=0.001)


@pytest.mark.proves("P46")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_request_whose_offer_is_lost_goes_to_the_next_worker(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """If the only worker is disconnected before its offer leaves, a second worker serves the request from the queue.

    The same holds for a decode phase, with the KV of the first worker.
    """
    monkeypatch.setattr(streams, "QueueLimits", lambda: QueueLimits(ack_wait_s=2.0))
    *before, first = SHAPES[shape]
    second = f"{first}2"
    load = await Load.of([greedy(1, 50, request_id="r")], OFFER_LOST_CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        contextlib.AsyncExitStack() as others,
        role_worker(proxy.url, fleet, first, OFFER_LOST_CONFIG) as (cut_off, _),
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        for name in before:
            await others.enter_async_context(role_worker(nats_url, fleet, name, OFFER_LOST_CONFIG))
        await until_paired(rb, *SHAPES[shape])
        await rb.complete(greedy(0, 2))
        # The worker can receive and cannot send. Its open pull delivers the request.
        proxy.freeze(Direction.TO_SERVER)
        completing = tasks.create_task(load.run(rb, legs=len(SHAPES[shape])))
        await until_true(lambda: cut_off.stats().links.requests == 2)
        async with role_worker(nats_url, fleet, second, OFFER_LOST_CONFIG):
            (generation,) = await completing
            proxy.thaw()
            await until_paired(rb, first, second)

            assert (generation.attempts, generation.worker_ids) == (1, (*before, second))
            await observer.check_at_rest()
