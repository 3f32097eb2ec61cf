"""A fleet on a Ray cluster of several nodes: under load it scales and loses nodes, and it leaves nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import rollbus
from rollbus.schemas.errors import RollbusError
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.ray.conftest import NODE
from tests.support.processes import becomes_true
from tests.support.requests import Load
from tests.support.waits import SOON_S

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ENGINE_ARGS = {"step_s": 0.003, "max_num_seqs": 16, "vocab_size": VOCAB_SIZE}
LEASE = ("--lease-s", "2")


def make_fleet(cluster: Any, **fields: Any) -> Any:
    """Return a fleet of synthetic workers that is not started."""
    from rollbus.ray import Fleet

    made = {"engine": "synthetic", "engine_args": ENGINE_ARGS, "worker_flags": LEASE, "nats_servers": 1}
    return Fleet(address=cluster.address, **{**made, **fields})


def left_over() -> tuple[set[str], set[str]]:
    """Return the names of living actors and the states of placement groups that are not removed."""
    from ray.util import placement_group_table

    actors = {actor["Name"] for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"}
    return actors, {group["state"] for group in placement_group_table().values()} - {"REMOVED"}


def until(is_met: Callable[[], bool]) -> None:
    """Wait for a condition."""
    assert becomes_true(is_met)


async def test_nothing_is_lost_while_the_fleet_scales_and_a_node_dies(cluster: Any) -> None:
    """Under load, workers join and leave and a node is killed: each request ends once, with the undisturbed result."""
    doomed = cluster.add_node(**NODE)
    load = await Load.lasting(80, SyntheticConfig.from_args(ENGINE_ARGS))
    with make_fleet(cluster, workers=2, cpus_per_worker=6) as fleet:
        await asyncio.to_thread(fleet.wait_serving, SOON_S)
        assert len({worker["node"] for worker in fleet.status()}) == 2

        async def kill_node() -> None:
            await asyncio.to_thread(cluster.remove_node, doomed, allow_graceful=False)
            cluster.add_node(**NODE)

        async with rollbus.connect(fleet.url) as rb:
            results = await load.run(rb, strikes={10: kill_node})
            assert any(result.attempts > 1 for result in results)

        def is_replaced() -> bool:
            return any(worker["launches"] > 1 and worker["state"] == "running" for worker in fleet.status())

        await asyncio.to_thread(until, is_replaced)
        assert any("died" in (worker["last_end"] or "") or worker["last_end"] for worker in fleet.status())
        async with rollbus.connect(fleet.url) as rb:
            await rb.fleet.wait_for_workers(2, timeout_s=SOON_S)

            async def shrink() -> None:
                await asyncio.to_thread(fleet.scale, 1)
                assert len(fleet.status()) == 1

            await load.run(rb, strikes={10: shrink})
        with pytest.raises(RollbusError, match=r"runs already .* at [\d.]+:\d+"):
            await asyncio.to_thread(make_fleet(cluster).start)
    assert left_over() == (set(), set())


def test_a_worker_over_two_nodes_ends_whole_and_once(cluster: Any) -> None:
    """One bundle a GPU, the actor on bundle 0 without GPUs; if the other node dies, the whole worker ends once."""
    nodes = [cluster.add_node(**NODE, num_gpus=2) for _ in range(2)]
    with make_fleet(cluster, workers=1, gpus_per_worker=4) as fleet:
        fleet.wait_serving(SOON_S)
        [worker] = fleet.status()
        held = worker["node"].split(", ")
        assert sorted(held) == sorted(node.node_id for node in nodes)
        [actor] = [one for one in ray._private.state.actors().values() if one["Name"].endswith("ray-0-1")]
        own = actor["Address"]["NodeID"]
        [other] = [node for node in nodes if node.node_id != own]
        cluster.remove_node(other, allow_graceful=False)
        until(lambda: fleet.status()[0]["launches"] == 2)
        assert "died" in fleet.status()[0]["last_end"]
        assert fleet.status()[0]["state"] == "waiting for resources"
        cluster.add_node(**NODE, num_gpus=2)
        fleet.wait_serving(SOON_S)
        assert fleet.status()[0]["launches"] == 2
    assert left_over() == (set(), set())


def test_a_lost_server_of_one_ends_the_fleet_and_of_three_does_not(cluster: Any) -> None:
    """The loss of the only NATS server ends the fleet with this reason. Of three servers, the fleet may lose one."""
    with make_fleet(cluster, workers=1) as fleet:
        fleet.wait_serving(SOON_S)
        ray.kill(ray.get_actor("rollbus:default:nats-0", namespace="rollbus"))
        with pytest.raises(RollbusError, match=r"1 of 1 NATS servers .* fleet ends"):
            fleet.wait()
    assert left_over() == (set(), set())
    for _ in range(2):
        cluster.add_node(**NODE)
    with make_fleet(cluster, workers=1, nats_servers=None) as fleet:
        assert "three nodes" in fleet.servers
        fleet.wait_serving(SOON_S)
        ray.kill(ray.get_actor("rollbus:default:nats-2", namespace="rollbus"))
        with rollbus.sync.connect(fleet.url) as rb:
            assert len(rb.complete([1, 2, 3], max_tokens=8, timeout_s=SOON_S).token_ids) == 8
    assert left_over() == (set(), set())


def test_the_command_detaches_and_what_a_dead_driver_owned_goes_with_it(cluster: Any) -> None:
    """A detached fleet outlives its command until `down`; another fleet ends with its killed command."""
    ray.init(address=cluster.address, log_to_driver=False)
    command = [sys.executable, "-P", "-m", "rollbus.frontend.cli", "ray"]
    common = ["--address", cluster.address, "--engine", "synthetic"]
    subprocess.run([*command, "up", *common, "--detach", "--nats-servers", "1"], check=True, timeout=SOON_S * 2)
    actors, _ = left_over()
    assert actors == {"rollbus:default", "rollbus:default:nats-0", "rollbus:default:ray-0-1"}
    again = subprocess.run([*command, "up", *common], check=False, timeout=SOON_S * 2, capture_output=True, text=True)
    assert again.returncode == 1
    assert "runs already" in again.stderr
    subprocess.run([*command, "down", "--address", cluster.address], check=True, timeout=SOON_S * 2)
    assert left_over() == (set(), set())
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for number in (signal.SIGKILL, signal.SIGTERM):
        running = subprocess.Popen(
            [*command, "up", *common, "--nats-servers", "1"], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert "rollbus is up" in running.stdout.readline()
        running.send_signal(number)
        assert running.wait(SOON_S * 2) == (0 if number == signal.SIGTERM else -number)
        running.stdout.close()
        until(lambda: left_over() == (set(), set()))
