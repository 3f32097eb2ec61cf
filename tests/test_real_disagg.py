"""A prefill and a decode worker on real engines together return the same results as a single worker."""

import asyncio
import contextlib
import json
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

import rollbus
from rollbus import FleetState, GenerateRequest, Generation
from rollbus.schemas.presence import WorkerState
from tests.support.fleet import check_generation, until_state
from tests.support.real_fleet import ENGINE_ARGS, STOP_TIMEOUT_S, WEIGHT_VERSION, ForkedWorker, greedy
from tests.support.requests import assert_same
from tests.support.waits import ENGINE_STARTS_S, SOON_S, UNHURRIED_LEASE_S, Shared, until_true

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("unhurried")]

BLOCK = 32
"""Block size of the KV cache of a worker with a connector on a CPU."""
NUM_TOKENS = 12
ABANDONED_AFTER_S = 60
LENGTHS = (1, 31, 32, 33, 100, 500)
ROLES = ("prefill", "decode")


@dataclass
class Pair:
    """A fleet of one prefill and one decode worker."""

    url: str
    fleet: str
    folder: Path
    """The folder with the stored KV."""
    processes: dict[str, ForkedWorker]
    """The worker processes, by role, which is also the worker id."""

    def kv_folders(self) -> list[Path]:
        """Return the folders of stored prefill phases."""
        return list(self.folder.iterdir())

    @contextlib.asynccontextmanager
    async def between_phases(
        self, rb: rollbus.Client, request: GenerateRequest
    ) -> AsyncIterator["asyncio.Task[Generation]"]:
        """Run the block after the KV of `request` has been stored and before a decode worker has loaded it."""
        assert self.kv_folders() == []
        self.processes["decode"].suspend()
        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(rb.complete(request))
                await until_true(lambda: any(self.folder.glob("*/*.safetensors")))
                yield task
                self.processes["decode"].resume()
        finally:
            self.processes["decode"].resume()

    def is_sound(self) -> bool:
        """Return True if both workers run, serve soon, and no KV is stored."""
        if any(process.poll() is not None for process in self.processes.values()):
            return False
        try:
            asyncio.run(wait_until_serving(self.url, self.fleet, SOON_S))
        except TimeoutError:
            return False
        return self.kv_folders() == []


@pytest.fixture(scope="module")
def pairs(
    nats_url: str, tiny_moes: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared[Pair]]:
    """Provide one pair for all tests, which is replaced after a test has broken it."""

    def make() -> contextlib.AbstractContextManager[Pair]:
        return running_pair(nats_url, tiny_moes[0], tmp_path_factory.mktemp("kv"))

    with Shared(make, is_sound=Pair.is_sound) as shared:
        yield shared


@pytest.fixture
def pair(pairs: Shared[Pair]) -> Pair:
    """Return two workers with the weights of `real_fleet`."""
    return pairs.get()


@contextlib.contextmanager
def running_pair(nats_url: str, model: Path, folder: Path) -> Iterator[Pair]:
    """Start both workers; at the end they exit with code 0."""
    fleet = f"disagg-{uuid.uuid4().hex[:8]}"
    extra = {"shared_storage_path": str(folder), "abandoned_after_s": ABANDONED_AFTER_S}
    connector = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}
    flags = [
        "--nats",
        nats_url,
        "--fleet",
        fleet,
        "--model",
        str(model),
        "--weight-version",
        str(WEIGHT_VERSION),
    ]
    flags += ["--weight-root", str(model.parent), "--kv-transfer-config", json.dumps(connector)]
    flags += ["--engine-args", json.dumps(ENGINE_ARGS), "--lease-s", f"{UNHURRIED_LEASE_S:g}", "--listen-s", "0"]
    processes = {role: ForkedWorker(*flags, "--role", role, "--worker-id", role) for role in ROLES}
    try:
        asyncio.run(wait_until_serving(nats_url, fleet, ENGINE_STARTS_S))
        yield Pair(nats_url, fleet, folder, processes)
        for process in processes.values():
            process.terminate()
        assert [process.wait(STOP_TIMEOUT_S) for process in processes.values()] == [0, 0]
    finally:
        for process in processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def both_serve(state: FleetState) -> bool:
    """Return True if both workers serve."""
    return {worker.worker for worker in state.workers if worker.state is WorkerState.SERVING} == {*ROLES}


async def wait_until_serving(nats_url: str, fleet: str, timeout_s: float) -> None:
    """Wait until both workers serve."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb, asyncio.timeout(timeout_s):
        await until_state(rb, both_serve)


@contextlib.asynccontextmanager
async def connected(pair: Pair) -> AsyncIterator[rollbus.Client]:
    """Provide a client that knows both workers."""
    async with rollbus.connect(pair.url, fleet=pair.fleet) as rb:
        await until_state(rb, both_serve)
        yield rb


def check_phases(generation: Generation, request: GenerateRequest) -> None:
    """Assert that the request had both phases and that its transferred tokens count as cached."""
    check_generation(generation, request)
    assert generation.attempts == 1
    assert generation.exact
    if request.prompt_len < BLOCK:
        assert generation.worker_ids == ("decode",)
    else:
        assert generation.worker_ids == ROLES
        assert generation.cached_tokens == request.prompt_len // BLOCK * BLOCK


@pytest.mark.proves("P24")
async def test_prompts_of_all_lengths_give_the_results_of_a_single_worker(pair: Pair, real_fleet: str) -> None:
    """Tokens, logprobs and routed experts equal those of a single worker, for any `routed_experts_prompt_start`."""
    async with connected(pair) as rb, rollbus.connect(pair.url, fleet=real_fleet) as single:
        for length in LENGTHS:
            for start in (0, length // 2, length):
                # The unique salt prevents prefix cache hits.
                request = greedy(length, NUM_TOKENS, routed_experts_prompt_start=start, cache_salt=f"{length}-{start}")
                generation = await rb.complete(request)
                check_phases(generation, request)
                assert_same(generation, await single.complete(request))
        # A repeated prompt with cached prefixes on both workers has the same results.
        repeated = greedy(500, NUM_TOKENS, routed_experts_prompt_start=9, cache_salt="500-0")
        assert_same(await rb.complete(repeated), await single.complete(repeated))
        assert rb.stats().prefill_legs == 3 * 4 + 1
    assert pair.kv_folders() == []


async def test_requests_without_a_prefill_phase_get_fresh_rows(pair: Pair, real_fleet: str) -> None:
    """A request without a prefill phase gets fresh rows, even if the decode worker has the prompt's transferred KV."""
    request = greedy(100, NUM_TOKENS, seed=77)
    async with connected(pair) as rb, rollbus.connect(pair.url, fleet=real_fleet) as single:
        check_phases(await rb.complete(request), request)
        async with rollbus.connect(pair.url, fleet=pair.fleet, prefill_min_tokens=10_000) as alone:
            generation = await alone.complete(request)
        assert generation.worker_ids == ("decode",)
        assert_same(generation, await single.complete(request))


async def test_a_request_whose_kv_is_lost_needs_a_second_attempt(pair: Pair, real_fleet: str) -> None:
    """If the KV is lost before it is loaded, the request needs a second attempt and returns the same result."""
    # The salt prevents the decode worker from using its own cache instead of loading the KV.
    request = greedy(100, NUM_TOKENS, seed=13, cache_salt="lost")
    async with connected(pair) as rb, rollbus.connect(pair.url, fleet=real_fleet) as single:
        async with pair.between_phases(rb, request) as running:
            shutil.rmtree(pair.kv_folders()[0])
        generation = running.result()
        check_generation(generation, request)
        assert_same(generation, await single.complete(request))
        assert generation.attempts == 2
        assert generation.worker_ids[0] == "prefill"
        # The engine and its transfers still work.
        again = replace(request, cache_salt="again")
        check_phases(await rb.complete(again), again)


@pytest.mark.proves("P24")
async def test_an_update_between_the_phases_never_mixes_weights(
    pair: Pair, real_fleet: str, tiny_moes: tuple[Path, Path]
) -> None:
    """An update between the phases never mixes weights: KV of old weights is used only with the old weights."""
    request = greedy(100, 200, seed=21, cache_salt="between")
    async with connected(pair) as rb, rollbus.connect(pair.url, fleet=real_fleet) as single:
        async with asyncio.TaskGroup() as tasks, pair.between_phases(rb, request) as running:
            update = tasks.create_task(rb.fleet.update_weights(tiny_moes[1], version=WEIGHT_VERSION + 1))
        assert update.result().is_complete
        check_generation(running.result(), request)
        assert sorted(running.result().weight_versions) == list(running.result().weight_versions)

        async with rollbus.connect(pair.url, fleet=pair.fleet, prefill_min_tokens=10_000) as alone:
            for seed in (21, 77):
                fresh = greedy(100, NUM_TOKENS, seed=seed)
                generation = await rb.complete(fresh)
                check_phases(generation, fresh)
                assert set(generation.weight_versions) == {WEIGHT_VERSION + 1}
                assert_same(generation, await alone.complete(fresh))
        back = await rb.fleet.update_weights(tiny_moes[0], version=WEIGHT_VERSION + 2)
        assert back.is_complete
        assert_same(
            await rb.complete(greedy(100, NUM_TOKENS, seed=77)), await single.complete(greedy(100, NUM_TOKENS, seed=77))
        )
