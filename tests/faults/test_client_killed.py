"""If a client is killed, engines end its requests. A stopped client that continues gets all of its results."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

import rollbus
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.support.disagg import SHAPES, role_of, shaped
from tests.support.invariants import Observer, observing
from tests.support.load import Load
from tests.support.requests import greedy
from tests.support.waits import until, until_true

NUM_SLOTS = 4
CONFIG = SyntheticConfig(step_s=0.002, max_num_seqs=NUM_SLOTS, max_model_len=10_000_000)


@contextlib.asynccontextmanager
async def client_program(url: str, fleet: str, num_requests: int, max_tokens: int) -> AsyncIterator[Process]:
    """Run `tests.support.client_program`, and yield it when its first chunk has arrived."""
    arguments = (url, fleet, str(num_requests), str(max_tokens))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.client_program", *arguments, stdout=PIPE
    )
    try:
        assert await process.stdout.readline() == b"started\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


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
    async with (
        observing(nats_url, fleet) as observer,
        shaped(nats_url, fleet, shape, CONFIG) as parts,
    ):
        async with client_program(nats_url, fleet, num_requests, 400) as program:
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
    num_requests, max_tokens = 4 * NUM_SLOTS, 500
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
        results = [json.loads(line) for line in (await program.communicate())[0].splitlines()]

        assert program.returncode == 0
        assert sorted(prompt for prompt, *_ in results) == list(range(num_requests))
        assert max(attempts for _, attempts, _, _ in results) > 1
        assert {worker for _, _, workers, _ in results for worker in workers} == set(SHAPES[shape])
        for prompt, _, _, tokens in results:
            assert tokens == load.expected[f"r-{prompt}"].token_ids.tolist()
        await observer.check_at_rest()
