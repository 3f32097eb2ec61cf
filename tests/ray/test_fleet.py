"""A fleet on a Ray cluster of several nodes: under load it scales and loses nodes, and it leaves nothing.

`make test` runs the first test, `make test-deploy` all of them.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import rollbus
from rollbus.schemas.errors import RollbusError
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe
from tests.chaos.workload import VOCAB_SIZE
from tests.support.processes import becomes_true
from tests.support.real_fleet import ENGINE_ARGS as REAL_ARGS
from tests.support.real_fleet import greedy
from tests.support.requests import Load
from tests.support.waits import ENGINE_STARTS_S, SOON_S

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ENGINE_ARGS = {"step_s": 0.003, "max_num_seqs": 16, "vocab_size": VOCAB_SIZE}
LEASE = ("--lease-s", "2")
takes_minutes = pytest.mark.skipif(
    "ROLLBUS_TEST_DEPLOY" not in os.environ, reason="takes minutes: `make test-deploy` runs it"
)
AddNode = Callable[..., Any]


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


async def test_nothing_is_lost_while_the_fleet_scales_and_a_node_dies(cluster: Any, add_node: AddNode) -> None:
    """Under load, workers join and leave and a node is killed: each request ends once, with the undisturbed result."""
    doomed = add_node()
    load = await Load.lasting(80, SyntheticConfig.from_args(ENGINE_ARGS))
    with make_fleet(cluster, workers=2, cpus_per_worker=2) as fleet:
        await asyncio.to_thread(fleet.wait_serving, SOON_S)
        assert len({worker["node"] for worker in fleet.status()}) == 2

        async def kill_node() -> None:
            await asyncio.to_thread(cluster.remove_node, doomed, allow_graceful=False)
            add_node()

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
    until(lambda: left_over() == (set(), set()))


@takes_minutes
async def test_workers_restart_one_by_one_under_their_ids(cluster: Any) -> None:
    """A rolling restart replaces each actor and loses nothing: ids stay, but a worker that died gets a new one."""
    load = await Load.lasting(80, SyntheticConfig.from_args(ENGINE_ARGS))
    with make_fleet(cluster, workers=2) as fleet:
        await asyncio.to_thread(fleet.wait_serving, SOON_S)
        async with rollbus.connect(fleet.url) as rb:
            before = {worker.worker: worker.incarnation for worker in (await rb.fleet.state()).workers}
            assert before.keys() == {"ray-0-1", "ray-1-1"}

            async def restart() -> None:
                result = await rb.fleet.restart_one_by_one(start_timeout_s=SOON_S)
                assert result.applied.keys() == before.keys()

            await load.run(rb, strikes={10: restart})
            after = {worker.worker: worker.incarnation for worker in (await rb.fleet.state()).workers}
            assert after.keys() == before.keys()
            assert not {*after.values()} & {*before.values()}
            assert [(worker["worker"], worker["launches"]) for worker in fleet.status()] == [
                ("ray-0-1", 2),
                ("ray-1-1", 2),
            ]
            ray.kill(ray.get_actor("rollbus:default:ray-0-2", namespace="rollbus"))
            await asyncio.to_thread(until, lambda: "ray-0-3" in {worker["worker"] for worker in fleet.status()})
            await rb.fleet.wait_for_workers(2, timeout_s=SOON_S)
    until(lambda: left_over() == (set(), set()))


@takes_minutes
def test_a_worker_over_two_nodes_ends_whole_and_once(cluster: Any, add_node: AddNode) -> None:
    """One bundle a GPU, the actor on bundle 0 without GPUs; if the other node dies, the whole worker ends once."""
    nodes = [add_node(num_gpus=2) for _ in range(2)]
    with make_fleet(cluster, workers=1, gpus_per_worker=4) as fleet:
        fleet.wait_serving(SOON_S)
        [worker] = fleet.status()
        held = worker["node"].split(", ")
        assert sorted(held) == sorted(node.node_id for node in nodes)
        # Actors of fleets of earlier tests are listed as dead.
        actors = [one for one in ray._private.state.actors().values() if one["State"] == "ALIVE"]
        [actor] = [one for one in actors if one["Name"].endswith("ray-0-1")]
        own = actor["Address"]["NodeID"]
        [other] = [node for node in nodes if node.node_id != own]
        cluster.remove_node(other, allow_graceful=False)
        until(lambda: fleet.status()[0]["launches"] == 2)
        assert "died" in fleet.status()[0]["last_end"]
        assert fleet.status()[0]["state"] == "waiting for resources"
        add_node(num_gpus=2)
        fleet.wait_serving(SOON_S)
        assert fleet.status()[0]["launches"] == 2
    until(lambda: left_over() == (set(), set()))


@takes_minutes
def test_a_lost_server_of_one_ends_the_fleet_and_of_three_does_not(cluster: Any, add_node: AddNode) -> None:
    """The loss of the only NATS server ends the fleet with this reason. Of three servers, the fleet may lose one."""
    with make_fleet(cluster, workers=1) as fleet:
        fleet.wait_serving(SOON_S)
        ray.kill(ray.get_actor("rollbus:default:nats-0", namespace="rollbus"))
        with pytest.raises(RollbusError, match=r"1 of 1 NATS servers .* fleet ends"):
            fleet.wait()
    until(lambda: left_over() == (set(), set()))
    for _ in range(2):
        add_node()
    with make_fleet(cluster, workers=1, nats_servers=None) as fleet:
        assert "three nodes" in fleet.servers
        fleet.wait_serving(SOON_S)
        ray.kill(ray.get_actor("rollbus:default:nats-2", namespace="rollbus"))
        with rollbus.sync.connect(fleet.url) as rb:
            assert len(rb.complete([1, 2, 3], max_tokens=8, timeout_s=SOON_S).token_ids) == 8
    until(lambda: left_over() == (set(), set()))


@takes_minutes
def test_the_command_detaches_and_what_a_dead_driver_owned_goes_with_it(cluster: Any) -> None:
    """A detached fleet outlives its command until `down`; another fleet ends with its killed command."""
    if not ray.is_initialized():
        ray.init(address=cluster.address, namespace="rollbus", log_to_driver=False)
    command = [sys.executable, "-P", "-m", "rollbus.frontend.cli", "ray"]
    common = ["--address", cluster.address, "--engine", "synthetic"]
    subprocess.run([*command, "up", *common, "--detach", "--nats-servers", "1"], check=True, timeout=SOON_S * 2)
    actors, _ = left_over()
    assert actors == {"rollbus:default", "rollbus:default:nats-0", "rollbus:default:ray-0-1"}
    again = subprocess.run([*command, "up", *common], check=False, timeout=SOON_S * 2, capture_output=True, text=True)
    assert again.returncode == 1
    assert "runs already" in again.stderr
    subprocess.run([*command, "down", "--address", cluster.address], check=True, timeout=SOON_S * 2)
    until(lambda: left_over() == (set(), set()))
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


@takes_minutes
@pytest.mark.vllm
@pytest.mark.routing
def test_a_real_engine_answers_in_an_actor(cluster: Any, tmp_path: Path) -> None:
    """An engine of vLLM starts in an actor, returns tokens with their routed experts, and ends with its worker."""
    model = make_tiny_moe(tmp_path / "moe", dtype="float32")
    fields = {"engine": "vllm", "engine_args": REAL_ARGS, "worker_flags": ()}
    with make_fleet(cluster, model=str(model), **fields) as fleet:
        fleet.wait_serving(ENGINE_STARTS_S)
        with rollbus.sync.connect(fleet.url) as rb:
            result = rb.complete(greedy(20, 8))
        assert len(result.token_ids) == 8
        assert result.routed_experts.shape[0] == 20 + 8 - 1
        [worker] = fleet.status()
        assert (worker["state"], worker["launches"]) == ("running", 1)
        [process] = [one for one in psutil.process_iter(["name"]) if one.info["name"].startswith("ray::Work")]
        engine = process.children(recursive=True)
        assert engine
    until(lambda: left_over() == (set(), set()))
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in engine))
