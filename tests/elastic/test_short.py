"""A minute's form of the elastic run, a worker that joins from its neighbours' weights, and a mixed rolling restart."""

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import rollbus
from rollbus.bus.control.rolling import is_back
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.protocol.fleet.loans import lone_reason
from rollbus.schemas.control import Restart
from rollbus.schemas.presence import WorkerPresence, WorkerRole, WorkerState
from tests.chaos.checkpoints import Checkpoints
from tests.chaos.publisher import FLEET, MODEL
from tests.elastic.load import Load
from tests.elastic.machines import Machines, Start
from tests.elastic.publishing import publisher
from tests.elastic.run import ENGINE, Settings, run
from tests.golden.test_mixed import RELEASES, Rewriting
from tests.support.fleet import capabilities, presence, until_worker
from tests.support.invariants import observing
from tests.support.nats_server import require_binary
from tests.support.processes import worker_process
from tests.support.requests import greedy, incomplete
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import until_true

pytestmark = pytest.mark.slow

SLOW = replace(ENGINE, step_s=0.03)
SHORT = Settings(
    seconds=15.0, seed=5, seconds_between_changes=0.6, seconds_between_versions=2.0, max_in_flight=24, step_s=0.03
)


@pytest.mark.proves("P1", "P8", "P9", "P16")
async def test_every_result_is_right_while_workers_come_and_go(tmp_path: Path) -> None:
    """While workers join, leave, die and restart, weights change and commands run, each result is as if undisturbed."""
    require_binary()
    said: list[str] = []
    with (tmp_path / "workers.log").open("wb") as log:
        summary = await run(SHORT, tmp_path / "run", stderr=log.fileno(), say=said.append)

    assert summary.results.keys() == {"whole", "stream", "session", "group"}
    assert len(said) == summary.changes.total() >= 3
    assert summary.num_versions >= 2


@contextlib.asynccontextmanager
async def supervised(url: str, fleet: str, start: Start) -> AsyncIterator[tuple[rollbus.Client, Machines]]:
    """Run a client and supervised workers, which all stop in order at the end of the block."""
    async with rollbus.connect(url, fleet=fleet, worker_grace_s=60.0) as rb, asyncio.TaskGroup() as keepers:
        machines = Machines(rb, keepers, start)
        try:
            yield rb, machines
        finally:
            await machines.stop()


@pytest.mark.proves("P12")
@pytest.mark.parametrize("release", RELEASES)
async def test_a_rolling_restart_moves_a_fleet_from_one_release_to_another(
    nats_url: str, fleet: str, release: str
) -> None:
    """Workers restart one by one on another wire under load; all results are as if undisturbed, and nothing is lost."""
    rewriting = Rewriting(RELEASES[release])
    started: dict[str, int] = {}
    async with tcp_proxy(nats_url) as other, observing(nats_url, fleet) as observer:
        other.make_filter = rewriting.filter

        def start(name: str) -> AbstractAsyncContextManager[Process]:
            started[name] = started.get(name, 0) + 1
            # The first process of a worker speaks this wire, and the second one the other.
            url = nats_url if started[name] == 1 else other.url
            options = ("--worker-id", name, "--lease-s", "10")
            return worker_process(url, fleet, *options, engine_args=msgspec.to_builtins(SLOW))

        async with supervised(nats_url, fleet, start) as (rb, machines):
            for _ in range(3):
                machines.join()
            await machines.until_all_serve()
            load = Load(rb, 1, ENGINE, {0: None})
            async with asyncio.TaskGroup() as tasks:
                load.begin(tasks, in_flight=30)
                await until_true(lambda: load.results.total() > 30)
                result = await rb.fleet.restart_one_by_one(start_timeout_s=120)
                num_before = load.results.total()
                await until_true(lambda: load.results.total() > num_before + 30)
                load.end()
            await observer.check_at_rest()
    assert result.applied.keys() == started.keys()
    assert started == dict.fromkeys(started, 2)
    assert rewriting.counts["req"] or rewriting.counts["direct"]
    assert max(load.attempts) > 1


async def test_a_restart_stops_at_the_first_worker_that_does_not_come_back(nats_url: str, fleet: str) -> None:
    """Without a supervisor, the first worker stays away: it is late, the others are missing and serve on."""
    async with contextlib.AsyncExitStack() as life, rollbus.connect(nats_url, fleet=fleet) as rb:
        for name in ("a", "b", "c"):
            await life.enter_async_context(worker_process(nats_url, fleet, "--worker-id", name))
        await rb.fleet.wait_for_workers(3)
        stopped = await incomplete(rb.fleet.restart_one_by_one(["b", "c"], start_timeout_s=0.5))
        assert [*stopped.ledger.late] == ["b"]
        assert stopped.ledger.missing == {"c": "not restarted"}
        assert stopped.ledger.late["b"].stage == "not back after 0.5 s: absent"
        assert stopped.ledger.applied == {}
        assert (await rb.complete(greedy(1, 3))).error is None
        assert {worker.worker for worker in rb.fleet.workers} == {"a", "c"}


async def test_a_restart_ends_only_the_incarnation_that_it_names(nats_url: str, fleet: str) -> None:
    """A late copy of the command is stale for the next process, which goes on."""
    async with worker_process(nats_url, fleet, "--worker-id", "a"), rollbus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers(1)
        failed = await incomplete(rb.fleet.send(Restart(incarnation="earlier", workers=("a",))))
        assert failed.ledger.stale.keys() == {"a"}
        assert (await rb.complete(greedy(1, 3))).error is None


@pytest.mark.parametrize(
    ("state", "role", "others", "is_lone"),
    [
        ("serving", "both", [], True),
        ("serving", "both", [("m", "serving", "both")], False),
        ("serving", "both", [("m", "paused", "both"), ("other", "serving", "both")], True),
        ("serving", "prefill", [("m", "serving", "decode"), ("m", "serving", "both")], True),
        ("serving", "decode", [("m", "serving", "prefill"), ("m", "serving", "both")], False),
        ("drained", "both", [], False),
    ],
)
def test_a_worker_is_alone_if_no_other_one_serves_its_requests(
    state: str, role: WorkerRole, others: list[tuple[str, str, WorkerRole]], *, is_lone: bool
) -> None:
    """Another worker counts if it serves the same model in a role that can take the requests."""

    def worker(name: str, model: str, state: str, role: WorkerRole) -> WorkerPresence:
        able = capabilities(role=role)
        return presence(worker=name, model=model, state=WorkerState(state), capabilities=able)

    mine = worker("a", "m", state, role)
    found = [mine, *(worker(f"b{number}", *each) for number, each in enumerate(others))]
    assert (lone_reason(mine, found) is not None) == is_lone


@pytest.mark.parametrize(
    ("before", "now", "is_restarted"),
    [("serving", "updating", False), ("paused", "paused", True), ("drained", "serving", True), ("paused", None, False)],
)
def test_a_worker_is_back_if_it_serves_or_is_as_before(before: str, now: str | None, *, is_restarted: bool) -> None:
    """A worker that had drained itself serves after its restart, because nothing is recorded."""
    found = None if now is None else presence(incarnation="2", state=WorkerState(now))
    assert is_back(presence(incarnation="1", state=WorkerState(before)), found) == is_restarted
    assert not is_back(presence(incarnation="1", state=WorkerState(before)), presence(incarnation="1"))


async def test_a_worker_that_joins_gets_published_weights_and_a_full_load(tmp_path: Path) -> None:
    """A worker that joins under load has the newest of several deltas before it serves, and is then full.

    On the machine of others it fetches nothing, because they share the directories. On its own machine it fetches the
    anchor and the deltas from the store.
    """
    checkpoints = Checkpoints(tmp_path, 3)
    async with EmbeddedServer() as server, observing(server.url, FLEET) as observer:

        def start(name: str) -> AbstractAsyncContextManager[Process]:
            cache = tmp_path / ("alone" if name == "w2" else "machine")
            options = ["--model", str(checkpoints.folders[0]), "--served-model-name", MODEL, "--engine", "synthetic"]
            options += ["--worker-id", name, "--lease-s", "10", "--cache-dir", str(cache)]
            return worker_process(server.url, FLEET, *options, engine_args=msgspec.to_builtins(SLOW))

        async with supervised(server.url, FLEET, start) as (rb, machines):
            machines.join()
            await machines.until_all_serve()
            load = Load(rb, 2, ENGINE, checkpoints.folders)
            async with (
                publisher(server.url, "publisher", checkpoints.folders[0]) as way,
                asyncio.TaskGroup() as tasks,
            ):
                for version in range(1, 5):
                    checkpoints.change("few")
                    published = await way.ask(version, checkpoints.write(version), "update")
                    assert "error" not in published, published
                load.begin(tasks, in_flight=8 * ENGINE.max_num_seqs)
                for _ in range(2):
                    name, joined_at = machines.join(), time.monotonic()
                    await machines.until_all_serve(4)
                    serving_at = time.monotonic()
                    await until_worker(rb, name, lambda it: it.in_flight >= ENGINE.max_num_seqs)
                    full_at = time.monotonic()
                    fetched = (await until_worker(rb, name, lambda it: it.counters)).counters.weights_fetched_bytes
                    assert (fetched > 0) == (name == "w2"), f"{name} fetched {fetched} bytes"
                    sys.stderr.write(
                        f"{name}: serves after {serving_at - joined_at:.1f} s, full {full_at - serving_at:.1f} s "
                        f"later, {fetched} bytes fetched\n"
                    )
                load.end()
            checkpoints.check(tmp_path / "machine")
            checkpoints.check(tmp_path / "alone")
            await observer.check_at_rest()
