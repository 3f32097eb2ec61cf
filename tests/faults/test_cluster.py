"""If a cluster of three servers loses some servers or is partitioned, no result is lost, duplicate or different.

The tests log the time without results (`--log-cli-level=info`) and do not assert it, because a slow machine takes
longer.
"""

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

import rollbus
from rollbus import GenerateRequest, RequestTimeout, SamplingParams
from rollbus.bus.nats import jetstream
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.queue.streams import stream_name
from rollbus.bus.subjects import BUCKET, Subjects
from rollbus.frontend.cli.doctor.machine import Status
from rollbus.frontend.cli.doctor.server import examine_bus
from rollbus.schemas.errors import RollbusError
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.worker import Worker
from tests.chaos.workload import VOCAB_SIZE
from tests.cli.support import run_rollbus
from tests.control.support import write_checkpoint
from tests.support.fleet import StartServed, synthetic_worker
from tests.support.invariants import Observer, check_results, observing
from tests.support.nats_cluster import NatsCluster, nats_cluster
from tests.support.nats_server import require_binary
from tests.support.requests import Load, error_of, greedy, short
from tests.support.waits import HANGS_AFTER_S, until_true

pytestmark = pytest.mark.slow

CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=8, vocab_size=VOCAB_SIZE)
"""Few slots, so that many requests wait in the queue."""
LEASE_S = 5.0
"""Lease for tests in which workers must detect a partition.

A worker without a core for this time restarts, without an effect on results.
"""
MODEL = "synthetic"
DESIRED = f"KV_{BUCKET}"


class Running(NamedTuple):
    """A cluster, its observer, and the workers by the number of their server."""

    cluster: NatsCluster
    observer: Observer
    workers: dict[int, Worker]


@contextlib.asynccontextmanager
async def running(fleet: str, *places: int, **fields: object) -> AsyncIterator[Running]:
    """Run a cluster with a worker at each of `places`. All three servers store the queue."""
    require_binary()
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(nats_cluster())
        observer = await stack.enter_async_context(observing(cluster.urls[places[0]], fleet, num_servers=3))
        workers = {}
        for place in places:
            starting = synthetic_worker(
                cluster.urls[place],
                fleet,
                worker_id=f"w{place}",
                **{"config": CONFIG, **fields},  # type: ignore[arg-type]
            )
            workers[place], _ = await stack.enter_async_context(starting)
        for worker in workers.values():
            await until_true(lambda worker=worker: state_of(worker) is WorkerState.SERVING)  # type: ignore[misc]
        await cluster.replicate()
        yield Running(cluster, observer, workers)


def state_of(worker: Worker) -> WorkerState | None:
    """Return the state of the worker, or None if it is not connected yet."""
    return worker.presence().state if worker.is_assembled else None


@pytest.mark.proves("P87")
async def test_results_do_not_change_if_the_leader_of_the_queue_is_killed(fleet: str) -> None:
    """If the server that leads the queue is killed under load, no result differs.

    Client and workers use different servers.
    """
    load = await Load.mixed(120, CONFIG)
    async with running(fleet, 0, 1) as (cluster, observer, _), rollbus.connect(cluster.urls[2], fleet=fleet) as rb:
        await rb.fleet.wait_for_workers(2)

        async def kill_leader() -> None:
            leader = await cluster.leader(stream_name(Subjects(fleet), MODEL, "normal"))
            await cluster.servers[leader].kill()

        await load.run(rb, strikes={10: kill_leader})
        for server in cluster.servers:
            if not server.is_running:
                await server.restart()
        await cluster.ready()
        await observer.check_at_rest()


@pytest.mark.proves("P87")
async def test_results_do_not_change_if_servers_restart_one_after_another(fleet: str) -> None:
    """If servers restart one after another, each when the previous one is current, every result is undisturbed."""
    load = await Load.mixed(150, CONFIG)
    async with running(fleet, 0, 1) as (cluster, observer, _), rollbus.connect(cluster.urls[2], fleet=fleet) as rb:
        await rb.fleet.wait_for_workers(2)
        turns = iter(cluster.servers)

        async def restart_next() -> None:
            await next(turns).restart()
            await cluster.ready()
            await cluster.replicate()

        strikes = {10: restart_next, 50: restart_next, 90: restart_next}
        await load.run(rb, strikes=strikes)
        await observer.check_at_rest()


@pytest.mark.proves("P88")
async def test_requests_complete_after_two_of_three_servers_return(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While two of three servers are gone, no request is accepted, and commands fail with the reason.

    Afterwards all requests complete.
    """
    load = await Load.mixed(80, CONFIG)
    async with (
        running(fleet, 0, lease_s=LEASE_S) as (cluster, observer, workers),
        rollbus.connect(cluster.urls[0], fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        await rb.fleet.flush_cache()
        await cluster.replicate()
        results: list[None] = []
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(load.run(rb, on_result=lambda: results.append(None)))
            await until_true(lambda: len(results) >= 10)
            for server in cluster.servers[1:]:
                await server.kill()
            await until_true(lambda: state_of(workers[0]) is WorkerState.UPDATING)
            await until_true(lambda: not workers[0].presence().in_flight)
            num_results = len(results)
            monkeypatch.setattr(jetstream, "ELECTION_S", 0.0)
            with pytest.raises(RollbusError, match="no leader now"):
                await rb.fleet.flush_cache()
            assert len(results) == num_results < len(load.requests)
            assert workers[0].presence().last_error is not None
            for server in cluster.servers[1:]:
                await server.restart()
            await cluster.ready()
            await loading
        await observer.check_at_rest()


@pytest.mark.proves("P89")
async def test_a_worker_disconnected_during_an_update_serves_no_old_weights(fleet: str, tmp_path: Path) -> None:
    """A worker that was disconnected during an update serves no old weights for later requests.

    The disconnected server has a worker, a client and the leader of the desired state. The other servers update without
    it. Later requests of the client get the new weights, even if it sends them before the reconnect.
    """
    checkpoints = [write_checkpoint(tmp_path / str(version), seed=version) for version in range(3)]
    fields: dict[str, Any] = {"lease_s": LEASE_S, "weight_roots": (str(tmp_path),), "model_path": str(checkpoints[0])}
    # Slow steps: the requests outlast the lease with few tokens.
    fields["config"] = replace(CONFIG, step_s=0.03)
    long, lost, after = (
        [greedy(prompt, length, request_id=f"{kind}{prompt}") for prompt in range(count)]
        # More requests than slots of one worker, so that both workers have some.
        for kind, length, count in (("long", 300, 9), ("lost", 300, 9), ("after", 10, 4))
    )
    async with (
        running(fleet, 0, 1, **fields) as (cluster, observer, workers),
        rollbus.connect(cluster.urls[0], fleet=fleet) as small,
        rollbus.connect(cluster.urls[1], fleet=fleet) as large,
    ):
        for rb in (small, large):
            await rb.fleet.wait_for_workers(2)
        await large.fleet.update_weights(checkpoints[1], version=1)
        await cluster.replicate()
        await cluster.lead(DESIRED, 0)
        async with asyncio.TaskGroup() as tasks:
            before = [
                tasks.create_task(rb.complete(request))
                for rb, part in ((small, long), (large, lost))
                for request in part
            ]
            await until_true(lambda: all(worker.presence().in_flight for worker in workers.values()))
            cluster.isolate(0)
            await until_true(lambda: [worker.worker for worker in large.fleet.workers] == ["w1"])
            updated = await large.fleet.update_weights(checkpoints[2], version=2)
            assert set(updated.applied) == {"w1"}
            later = [tasks.create_task(small.complete(request)) for request in after]
            # These requests reach no worker, because the connected worker does not know its desired state.
            await until_true(lambda: state_of(workers[0]) is WorkerState.UPDATING)
            assert workers[0].presence().weight_version == 1
            await cluster.heal()
            for rb in (small, large):
                await rb.fleet.wait_for_workers(2)
        await observer.check_at_rest()

    results = [task.result() for task in before]
    check_results(results, [*long, *lost])
    check_results([task.result() for task in later], after)
    assert {int(version) for task in later for version in task.result().weight_versions} == {2}


# A full disk of nats-server: clients, `doctor` and `status` name it and the remedy. Nothing else shows it.


REMEDY = "free space on the disk of nats-server, then restart nats-server"
UNANSWERED_S = 9.0
"""Seconds in which a client repeats a request four times."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 20 MB. The test is skipped without the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "rollbus-test", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def long() -> GenerateRequest:
    """Return a request that is larger than a block of the disk."""
    return GenerateRequest(
        prompt_token_ids=range(10_000), sampling=SamplingParams(max_tokens=3), timeout_s=UNANSWERED_S
    )


def fill(disk: Path) -> None:
    """Use all space of a file system."""
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(65_536)):
                pass
        except OSError as error:
            assert error.errno == 28


async def test_a_full_disk_is_named_with_the_restart_as_remedy(
    small_disk: Path, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The waiting request, the client's log, `doctor` and `status` name a full disk, even after space was freed."""
    require_binary()
    caplog.set_level(logging.WARNING, "rollbus.bus.queue")
    async with (
        EmbeddedServer(store_dir=small_disk / "js") as server,
        synthetic_worker(server.url, fleet, config=SyntheticConfig(max_model_len=20_000)),
        rollbus.connect(server.url, fleet=fleet, placement=False) as rb,
        asyncio.timeout(HANGS_AFTER_S),
    ):
        await rb.fleet.wait_for_workers()
        await rb.complete(short("before"))
        healthy = await rb.fleet.check_queues()
        fill(small_disk)
        error = await error_of(rb.complete(long()), RequestTimeout)
        (small_disk / "fill").unlink()
        findings = {finding.check: finding async for finding in examine_bus(server.url, None, fleet)}
        status = await run_rollbus(server.url, fleet, "status")

    assert healthy == {}
    assert REMEDY in error.message
    logged = [line for line in caplog.messages if line.startswith("queue.unanswered")]
    assert [line.split(" rounds=")[1].split()[0] for line in logged[:3]] == ["1", "2", "4"]
    assert all(REMEDY in line for line in logged)
    finding = findings["queue of synthetic"]
    assert (finding.status, finding.advice) == (Status.FAIL, f"if this lasts, {REMEDY}")
    assert REMEDY in " ".join(status.stdout.split())


async def test_probes_leave_nothing_in_a_queue(
    nats_url: str, fleet: str, one_worker: StartServed, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker removes a probe without a log line and without counting it as a request."""
    async with one_worker(options={"placement": False}) as (rb, worker, _):
        assert await rb.fleet.check_queues() == {}
        await until_true(lambda: worker.stats().puller.probes == 2)
        state = await rb.fleet.state()

    assert [depth.waiting + depth.in_hand for depth in state.queues] == [0, 0, 0, 0]
    assert worker.stats().intake.taken == worker.stats().intake.bad == 0
    assert not [line for line in caplog.messages if "rejected" in line]
