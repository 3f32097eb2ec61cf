"""Decisions of a fleet on Ray: shapes of placement groups, executors, versions, restarts, options."""

import asyncio
import json
from typing import Any

import pytest

from rollbus.schemas.errors import InvalidRequest, RollbusError
from rollbus.workers.ray.plan import FleetSpec, Shape, Versions, check_versions, nats_text, shape
from rollbus.workers.ray.supervisor import Slot, Supervisor

RAY = {"distributed_executor_backend": "ray"}


def spec(**fields: Any) -> FleetSpec:
    """Return a fleet of one worker with these fields."""
    return FleetSpec(**{"model": "/m", "cpus_per_worker": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "node_gpus", "expected"),
    [
        ({}, 0, Shape([{"CPU": 2.0}], "STRICT_PACK", 0, None)),
        ({"cpus_per_worker": 0}, 0, Shape([{"CPU": 0.001}], "STRICT_PACK", 0, None)),
        ({"gpus_per_worker": 1}, 8, Shape([{"CPU": 2.0, "GPU": 1.0}], "STRICT_PACK", 1, None)),
        ({"gpus_per_worker": 8}, 8, Shape([{"CPU": 2.0, "GPU": 8.0}], "STRICT_PACK", 8, "mp")),
        (
            {"gpus_per_worker": 2, "engine_args": RAY},
            8,
            Shape([{"GPU": 1.0, "CPU": 2.0}, {"GPU": 1.0}], "STRICT_PACK", 0, "ray"),
        ),
        ({"gpus_per_worker": 3}, 2, Shape([{"GPU": 1.0, "CPU": 2.0}, *[{"GPU": 1.0}] * 2], "PACK", 0, "ray")),
    ],
)
def test_a_worker_takes_its_gpus_or_leaves_one_bundle_a_gpu_to_vllm(
    fields: dict[str, Any], node_gpus: float, expected: Shape
) -> None:
    """On one node the actor has all GPUs of one bundle; with vLLM's Ray executor it has none, and each GPU a bundle."""
    assert shape(spec(**fields), node_gpus) == expected


async def test_the_number_of_a_worker_that_leaves_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that is scaled up while workers leave has all its workers at the end."""

    async def keep(self: Supervisor, slot: Slot) -> None:
        await slot.leaving.wait()
        del self._slots[slot.index], self._keepers[slot.index]

    monkeypatch.setattr(Supervisor, "_keep", keep)
    supervisor = Supervisor({"model": "/m"})
    async with asyncio.TaskGroup() as supervisor._tasks:
        await supervisor.scale(1)
        supervisor._slots[0].leaving.set()
        await supervisor.scale(1)
        assert not supervisor._slots[0].leaving.is_set()
        await supervisor.scale(0)


def test_the_engine_gets_the_executor_of_the_shape() -> None:
    """Of several GPUs on one node vLLM would use Ray's executor, so the worker's options select the other one."""
    wide = spec(gpus_per_worker=2)
    flags = wide.flags("nats://a", "w", shape(wide, 2))
    assert json.loads(flags[flags.index("--engine-args") + 1]) == {"distributed_executor_backend": "mp"}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None},
        {"workers": -1},
        {"gpus_per_worker": -1},
        {"cpus_per_worker": -1},
        {"engine": "other"},
        {"fleet": "a.b"},
        {"nats_servers": 2},
        {"nats": "nats://a", "nats_servers": 1},
        {"worker_flags": ["--worker-id", "w"]},
        {"worker_flags": ["--creds=file"]},
    ],
)
def test_a_wrong_option_is_rejected(fields: dict[str, Any]) -> None:
    """Each wrong option is an error that names it, before anything starts."""
    with pytest.raises(InvalidRequest):
        spec(**fields)


def test_other_versions_are_rejected_with_both() -> None:
    """Ray and Python must agree to the minor version; the error has the version of the driver and of the node."""
    own = Versions("this process", "2.60.0", "3.11.9")
    check_versions(own, [Versions("node a", "2.60.1", "3.11.2")])
    with pytest.raises(RollbusError, match=r"Ray 2\.60\.0 of this process and Ray 2\.54\.0 of node b"):
        check_versions(own, [Versions("node b", "2.54.0", "3.11.9")])
    with pytest.raises(RollbusError, match=r"Python 3\.11\.9 .* Python 3\.12\.1 of node c"):
        check_versions(own, [Versions("node c", "2.60.0", "3.12.1")])


def test_the_text_says_which_servers_run() -> None:
    """`up` prints which of the three kinds of NATS servers the fleet has."""
    assert "outside" in nats_text(spec(nats="nats://a"), 0)
    assert "loss ends the fleet" in nats_text(spec(), 1)
    assert "three nodes" in nats_text(spec(), 3)
