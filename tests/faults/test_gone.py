"""If workers and the NATS server are gone, requests fail after the grace time and not at their deadlines."""

import asyncio
import contextlib
import json
import signal
from asyncio.subprocess import PIPE
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

import rollbus
from rollbus.bus.client import runtime
from rollbus.bus.client.links import MAX_WINDOW_BYTES
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.protocol.attempt import machine
from rollbus.schemas.errors import ErrorCode, NoWorkers, RequestError
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.disagg import SHAPES, check_legs, role_of, shaped, until_paired
from tests.support.fleet import served, synthetic_worker
from tests.support.forks import Fork
from tests.support.hand_worker import chunk, request, worker_by_hand
from tests.support.invariants import Observer, observing
from tests.support.nats_server import require_binary
from tests.support.processes import forked, worker_process
from tests.support.requests import Load, greedy
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import until, until_true

pytestmark = pytest.mark.slow

SLOW = {"step_s": 0.05, "max_num_seqs": 1}


async def failing(rb: rollbus.Client, *, after: asyncio.Event | None = None) -> RequestError:
    """Return the error of a request that would run for minutes, and set `after` when it has a token."""
    with pytest.raises(RequestError) as caught:  # noqa: PT012
        async for _ in rb.generate(greedy(1, 10_000)):
            if after is not None:
                after.set()
    return caught.value


@pytest.mark.proves("P1", "P69")
async def test_requests_fail_if_workers_and_server_are_killed_together(
    fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests fail with `worker_lost`, and waiting and new requests with `no_workers`."""
    require_binary()
    monkeypatch.setattr(runtime, "UNHEARD_S", 0.5)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer())
        process = await stack.enter_async_context(worker_process(server.url, fleet, engine_args=SLOW))
        rb = await stack.enter_async_context(rollbus.connect(server.url, fleet=fleet, worker_grace_s=0.5))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        await rb.fleet.wait_for_workers(timeout_s=60)
        runs = asyncio.Event()
        running = tasks.create_task(failing(rb, after=runs))
        await runs.wait()
        waiting = tasks.create_task(failing(rb))
        await asyncio.sleep(0)
        process.kill()
        await server.kill()
        errors = [await running, await waiting]

        assert [error.code for error in errors] == [ErrorCode.WORKER_LOST, ErrorCode.NO_WORKERS]
        assert all(error.retryable for error in errors)
        assert "NATS has not answered" in errors[0].message
        with pytest.raises(NoWorkers, match="the connection to NATS is down"):
            await rb.complete(greedy(1, 1))
        await server.restart()


async def test_the_grace_time_starts_when_the_workers_stop(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the workers stopped in order, the grace time starts then, whether or not the server is present."""
    require_binary()
    monkeypatch.setattr(runtime, "UNHEARD_S", 3600.0)
    async with (
        EmbeddedServer() as server,
        rollbus.connect(server.url, fleet=fleet, worker_grace_s=1.5) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        async with synthetic_worker(server.url, fleet, config=SyntheticConfig(step_s=0.05)):
            await rb.fleet.wait_for_workers()
            runs = asyncio.Event()
            running = tasks.create_task(failing(rb, after=runs))
            await runs.wait()
        await server.kill()
        error = await running
        await server.restart()

    assert error.code is ErrorCode.WORKER_STOPPED
    assert error.retryable


async def test_requests_wait_for_the_only_worker_to_start(nats_url: str, fleet: str) -> None:
    """Requests wait for a starting worker beyond the grace time, up to the start time that the worker announces."""
    async with (
        worker_by_hand(nats_url, fleet) as worker,
        rollbus.connect(nats_url, fleet=fleet, client="me", worker_grace_s=0.2) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        completing = tasks.create_task(rb.complete(request(1)))
        first = await worker.next_key()
        await worker.frame(0, admitted=(first,))
        await worker.acked(1)
        worker.start_left_s = 100.0
        await worker.announce(WorkerState.FAILED)
        worker.incarnation = "life-2"
        await worker.announce(WorkerState.STARTING)
        # Several rounds in which the request could fail.
        _, pending = await asyncio.wait([completing], timeout=2)
        assert pending
        worker.start_left_s = None
        await worker.announce()
        second = await worker.next_key()
        await worker.frame(0, chunk(second, 0, 1, total=1), admitted=(second,))
        await completing

        late = tasks.create_task(failing(rb))
        key = await worker.next_key()
        await worker.frame(1, admitted=(key,))
        await worker.acked(2)
        await worker.announce(WorkerState.FAILED)
        worker.start_left_s = 0.0
        await worker.announce(WorkerState.STARTING)
        assert (await late).code is ErrorCode.WORKER_LOST


async def test_no_request_fails_if_the_server_returns_within_the_grace_time(
    fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server is away for longer than a lease but less than lease and grace time, no request fails."""
    require_binary()
    monkeypatch.setattr(runtime, "UNHEARD_S", 0.5)
    async with (
        EmbeddedServer() as server,
        served(server.url, fleet, config=SyntheticConfig(step_s=0.01), lease_s=2.0, options={"worker_grace_s": 60}) as (
            rb,
            *_,
        ),
    ):
        stream = rb.generate(greedy(1, 300))
        chunks = [await anext(stream)]
        await server.kill()
        # The test is about an outage of this length.
        await asyncio.sleep(3)
        await server.restart()
        chunks += [chunk async for chunk in stream]

    assert sum(chunk.num_tokens for chunk in chunks) == 300


# If a client is killed, engines end its requests. A stopped client that continues gets all of its results.


NUM_SLOTS = 4
CONFIG = SyntheticConfig(step_s=0.01, max_num_seqs=NUM_SLOTS, max_model_len=10_000_000)


@contextlib.asynccontextmanager
async def client_program(url: str, fleet: str, num_requests: int, max_tokens: int) -> AsyncIterator[Fork]:
    """Run `tests.faults.client_program`, and yield it when its first chunk has arrived."""
    arguments = (url, fleet, str(num_requests), str(max_tokens))
    async with forked("tests.faults.client_program", arguments, streams=(None, PIPE, 2)) as process:
        assert await process.stdout.readline() == b"started\n"
        yield process


def record_adds(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[KvTransfer | None]]:
    """Return a record of the KV parameters of each request that engines receive from now on, by role of the engine."""
    given: dict[str, list[KvTransfer | None]] = defaultdict(list)
    add = SyntheticEngine.add

    async def recording(
        self: SyntheticEngine, key: str, request: GenerateRequest, kv: KvTransfer | None = None
    ) -> None:
        given[self.capabilities.role].append(kv)
        await add(self, key, request, kv)

    monkeypatch.setattr(SyntheticEngine, "add", recording)
    return given


async def until_queued(observer: Observer, at_least: int) -> None:
    """Wait until this number of requests is in the queue."""

    async def are_queued() -> bool:
        return sum(counts.get("messages", 0) for counts in (await observer.queued()).values()) >= at_least

    await until(are_queued, True)


@pytest.mark.proves("P7")
@pytest.mark.parametrize("shape", SHAPES)
async def test_the_requests_of_a_killed_client_are_aborted(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """After SIGKILL of a client and the end of its lease, the engine aborts its requests.

    Its queued requests do not run.
    """
    given = record_adds(monkeypatch)
    num_requests = 60
    async with observing(nats_url, fleet) as observer, shaped(nats_url, fleet, shape, CONFIG) as parts:
        async with client_program(nats_url, fleet, num_requests, 80) as program:
            await until_queued(observer, num_requests - 2 * NUM_SLOTS)
            program.kill()
            await until(observer.queued, {})
            await until_true(parts.are_idle)
        # Each request takes a second, so some may have run within the lease.
        last = given[role_of(SHAPES[shape][-1])]
        assert len(last) < num_requests
        # With a prefill worker, at least one had KV. On a busy machine, one may have waited too long for it.
        assert any(kv is not None and kv.params is not None for kv in last) == (shape == "disaggregated")

        async with rollbus.connect(nats_url, fleet=fleet) as rb:
            assert len((await rb.complete(greedy(1, 10))).token_ids) == 10


@pytest.mark.proves("P67")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_stopped_client_gets_all_results_after_sigcont(nats_url: str, fleet: str, shape: str) -> None:
    """If a client is stopped for longer than its lease, the engine ends its requests.

    After SIGCONT, every request completes.
    """
    # The load exceeds the lease, so some requests have finished, some run and some wait when the lease ends.
    num_requests, max_tokens = 4 * NUM_SLOTS, 100
    load = await Load.of([greedy(index, max_tokens, request_id=f"r-{index}") for index in range(num_requests)], CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        shaped(nats_url, fleet, shape, CONFIG) as parts,
        client_program(nats_url, fleet, num_requests, max_tokens) as program,
    ):
        await until_queued(observer, num_requests - 2 * NUM_SLOTS)
        program.send_signal(signal.SIGSTOP)
        try:
            await until(observer.queued, {})
            await until_true(parts.are_idle)
        finally:
            program.send_signal(signal.SIGCONT)
        results = [json.loads(line) async for line in program.stdout]

        assert await program.wait() == 0
        assert sorted(prompt for prompt, *_ in results) == list(range(num_requests))
        assert max(attempts for _, attempts, _, _ in results) > 1
        assert {worker for _, _, workers, _ in results for worker in workers} == set(SHAPES[shape])
        for prompt, _, _, tokens in results:
            assert tokens == load.expected[f"r-{prompt}"].token_ids.tolist()
        await observer.check_at_rest()


# A client with a slow connection and many routed experts: the worker merges frames and waits, and drops nothing.


SLOW_CLIENT_CONFIG = SyntheticConfig(step_s=0.001, num_layers=32, top_k=8)
ROW_BYTES = 32 * 8
PROMPT_LEN = 8000
NUM_REQUESTS = 12
TOTAL_BYTES = NUM_REQUESTS * PROMPT_LEN * ROW_BYTES
"""24 MB: many times the window of a client."""


@pytest.mark.proves("P6")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_slow_client_loses_nothing(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """For a client that receives 8 MB/s, only its window of routed experts is in transit. The rest waits at the worker.

    Most rows belong to prompts, and come from the prefill worker if the fleet has one.
    """
    # On a busy machine, some offers of a prefill worker would be late behind the rows of other requests.
    monkeypatch.setattr(machine, "HAND_OVER_S", 60.0)
    requests = [
        GenerateRequest(
            request_id=f"large-{index}",
            prompt_token_ids=[index] * PROMPT_LEN,
            sampling=SamplingParams(max_tokens=50, temperature=0, ignore_eos=True),
        )
        for index in range(NUM_REQUESTS)
    ]
    load = await Load.of(requests, SLOW_CLIENT_CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        shaped(nats_url, fleet, shape, SLOW_CLIENT_CONFIG) as parts,
        rollbus.connect(proxy.url, fleet=fleet, client="slow") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await until_paired(rb, *parts.workers)
        proxy.bytes_per_s = 8_000_000
        most = LargestValues()
        watching = tasks.create_task(most.watch(observer, parts.workers[SHAPES[shape][0]]))
        results = await load.run(rb, legs=len(parts.workers))
        watching.cancel()

        assert {generation.attempts for generation in results} == {1}
        check_legs(results, shape)
        # Until a write is complete, the server counts all of its bytes as pending.
        assert most.pending_bytes < 1.5 * MAX_WINDOW_BYTES
        # The worker buffered the engine's output less the bytes in transit, and no more than the engine made.
        assert TOTAL_BYTES / 4 < most.held_bytes < 1.1 * TOTAL_BYTES
        await observer.check_at_rest()


class LargestValues:
    """Largest observed values."""

    def __init__(self) -> None:
        self.pending_bytes = 0
        """Bytes in the server for the client."""
        self.held_bytes = 0
        """Bytes at the worker."""

    async def watch(self, observer: Observer, worker: Worker) -> None:
        """Update the values repeatedly until cancelled."""
        while True:
            self.pending_bytes = max(self.pending_bytes, await observer.pending_bytes("client slow"))
            self.held_bytes = max(self.held_bytes, worker.presence().held_bytes)
            await asyncio.sleep(0.01)
