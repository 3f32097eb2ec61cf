"""verl's own server manager, clients, agent loop and checkpoint manager, unchanged, with two workers and a small Ray.

Not verl's: the process that holds the trainer's weights. verl's FSDP engine is registered for `cuda` and `npu` only.
"""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe
from tests.integrations.support import find_python, needs, run_program
from tests.ray.conftest import LOCK
from tests.support.processes import becomes_true
from tests.support.real_fleet import RealWorkers

pytestmark = [pytest.mark.vllm, pytest.mark.routing, needs("verl")]
PROGRAM = Path(__file__).parent / "programs" / "rollouts.py"


@pytest.fixture
def workers(nats_url: str, tmp_path: Path) -> Iterator[RealWorkers]:
    """Real workers of a tiny model with experts in float32."""
    model = make_tiny_moe(tmp_path / "moe", dtype="float32")
    found = RealWorkers(nats_url, model, version=0, cache=tmp_path / "cache")
    yield found
    found.stop()


@pytest.fixture
def one_ray() -> Iterator[None]:
    """Allow one Ray at a time, and fail if a process of it is left."""
    with LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = ray_processes()
        yield
        assert becomes_true(lambda: not ray_processes() - before), "a process of Ray is left"


def ray_processes() -> set[int]:
    """Return the processes of Ray nodes, and of actors on them. verl's actors have names of their own."""
    running = (process for process in psutil.process_iter(["name", "status"]) if process.info["name"])
    return {
        process.pid
        for process in running
        if process.info["name"].startswith(("raylet", "gcs_server", "ray::"))
        and process.info["status"] != psutil.STATUS_ZOMBIE
    }


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_samples_are_those_of_the_reference_although_a_worker_dies_and_weights_change(
    nats_url: str, workers: RealWorkers, one_ray: None, tmp_path: Path, mode: str
) -> None:
    """Rows and log probabilities of samples equal a forward pass, with a killed worker and new weights in the middle.

    A trainer that fails while it sends leaves the old weights in use, and the next update works.
    """
    name, first = next(iter((await workers.have(2)).items()))

    def kill(line: str) -> None:
        if line == "sampling":
            first.kill()

    seen = await run_program(
        PROGRAM, nats_url, workers.fleet, tmp_path / "moe", mode, name, python=find_python("verl"), on_line=kill
    )
    assert seen["killed_with"] > 0
    assert seen["samples"] >= 200
    assert seen["wrong_rows"] == 0, seen["rows"]
    assert seen["difference"] < 1e-3
    assert seen["spanned"] > 0, "the update came in the middle"
    assert seen["greedy"]
    assert "actor_rollout_ref.hybrid_engine is set; allowed: False" in seen["hybrid"]
    assert "the trainer ran out of memory" in seen["errors"][0]
    assert seen["after_failure"] == [[1, 1]]
    assert seen["after_repair"] == [[3, 3]]
