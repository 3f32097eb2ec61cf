"""The test cluster starts, loses a leader, is partitioned and recovers."""

import pytest

from rollbus.bus.nats.jetstream import ask, create_stream, put
from tests.support.connections import opened
from tests.support.nats_cluster import nats_cluster
from tests.support.nats_server import require_binary
from tests.support.waits import until


@pytest.mark.slow
async def test_a_cluster_survives_a_lost_leader_and_an_isolated_server() -> None:
    """A stream of three replicas survives its leader's loss, and an isolated server receives all messages later."""
    require_binary()

    async with nats_cluster() as cluster, opened(cluster.urls[0]) as first:
        await create_stream(first, {"name": "S", "subjects": ["s"]})
        await cluster.replicate()
        leader = await cluster.leader("S")
        await cluster.servers[leader].kill()
        new_leader = await cluster.leader("S")
        async with opened(cluster.urls[new_leader]) as second:
            assert new_leader != leader
            assert await put(second, "s", b"1") == 1
            await cluster.servers[leader].restart()
            await cluster.ready()
            other = 3 - leader - new_leader
            cluster.isolate(other)
            # Two of three servers are a majority.
            assert await put(second, "s", b"2") == 2
            await cluster.heal()

            async def num_current() -> int:
                info = await ask(second, "STREAM.INFO.S")
                return sum(replica["current"] for replica in info["cluster"]["replicas"])

            await until(num_current, 2)
            cluster.stop(other)
            assert await put(second, "s", b"3") == 3
