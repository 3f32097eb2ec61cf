"""`doctor` and `status` with a cluster of three servers, complete and with failed servers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import connected
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.bus.subjects import published_bucket
from rollbus.frontend.cli.doctor.machine import Finding, Status
from rollbus.frontend.cli.doctor.server import examine_bus
from tests.cli.support import run_rollbus, run_together
from tests.support.fleet import synthetic_worker
from tests.support.nats_cluster import NatsCluster, nats_cluster
from tests.support.nats_server import require_binary
from tests.support.waits import until

pytestmark = pytest.mark.slow

MODEL = "synthetic"


async def findings(urls: str) -> list[Finding]:
    """Return the findings that are not ok."""
    return [finding async for finding in examine_bus(urls, None, "f") if finding.status is not Status.OK]


def about(found: list[Finding], check: str, status: Status) -> str:
    """Return findings and advice of one check with one status."""
    return "\n".join(f"{one.found} -> {one.advice}" for one in found if (one.check, one.status) == (check, status))


async def streams_without_share(server: Server) -> None:
    """Reconfigure the queue as an earlier release created it."""
    async with connected(server, name="test") as nats:
        config = (await ask(nats, f"STREAM.INFO.rb~f~{MODEL}"))["config"]
        config |= {"max_msgs_per_subject": -1, "discard_new_per_subject": False}
        await ask(nats, f"STREAM.UPDATE.rb~f~{MODEL}", config)


@asynccontextmanager
async def served_cluster() -> AsyncIterator[tuple[NatsCluster, str]]:
    """Run three servers and a worker. Its queue has one replica, and no limit for each client."""
    require_binary()
    async with nats_cluster() as cluster:
        urls = ",".join(cluster.urls)
        server = Server(urls, replicas=1)
        await provision(server, "f", [MODEL], upload_bytes=1 << 20)
        await streams_without_share(server)
        async with synthetic_worker(urls, "f", worker_id="w0"):
            yield cluster, urls


async def check_a_queue_without_leader(cluster: NatsCluster, urls: str) -> None:
    """Kill the only server with the queue, compare `status` and `doctor`, and restart the server."""
    whole = await run_rollbus(urls, "f", "status", "--json")
    [normal] = [queue for queue in json.loads(whole.stdout)["queues"] if queue["lane"] == "normal"]
    leader = await cluster.leader(f"rb~f~{MODEL}")
    assert (normal["leader"], normal["replicas"], normal["behind"]) == (f"n{leader}", 1, [])

    await cluster.servers[leader].kill()
    await cluster.meta_leader()

    async def is_found() -> bool:
        return "2 of 3 known servers are reachable" in about(await findings(urls), f"queue of {MODEL}", Status.FAIL)

    await until(is_found, expected=True)
    table, as_json = await run_together(urls, "f", "status", "status --json")
    problem = "has no leader: 2 of 3 known servers are reachable"
    assert problem in table.stdout
    assert json.loads(as_json.stdout)["queue_problems"] == {MODEL: problem}
    await cluster.servers[leader].restart()
    await cluster.ready()


async def test_doctor_and_status_report_what_a_cluster_lacks() -> None:
    """`doctor` reports too few replicas and a missing limit for each client, a failed server, and a lost majority.

    If the only server with the queue has failed, `status` reports in table and JSON that the queue has no leader.
    """
    async with served_cluster() as (cluster, urls):
        await check_a_queue_without_leader(cluster, urls)
        found = await findings(urls)
        few = about(found, "replicas", Status.WARN)
        assert "fewer than 3 in a cluster of 3 servers" in few
        for stream in (f"queue of {MODEL}", "sessions", f"published weights in {published_bucket('f', MODEL)}"):
            assert f"{stream}: 1" in few
        assert "nats stream edit NAME --replicas 3" in few
        assert f"make-queue {MODEL} --max-per-client 1024" in about(found, f"queue of {MODEL}", Status.WARN)

        await cluster.replicate()
        assert about(await findings(urls), "replicas", Status.WARN) == ""

        await cluster.servers[0].kill()
        seen: list[Finding] = []

        async def is_behind() -> bool:
            seen[:] = await findings(urls)
            return "2 of 3 replicas are current; behind: n0" in about(seen, f"queue of {MODEL}", Status.WARN)

        await until(is_behind, expected=True)
        # The server has failed, but `doctor` can connect to the two others.
        assert cluster.urls[0] in about(seen, "server", Status.WARN)

        await cluster.servers[1].kill()

        async def is_without_majority() -> bool:
            return "1 of 3 known servers are reachable" in about(await findings(urls), "jetstream", Status.FAIL)

        await until(is_without_majority, expected=True)
        for index in (0, 1):
            await cluster.servers[index].restart()
        await cluster.ready()
