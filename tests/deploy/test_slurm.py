"""`deploy/slurm`: a real Slurm runs the job; workers and whole jobs end, and no request is lost."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import rollbus
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.deploy.slurm_cluster import Slurm, running_slurm
from tests.support.fleet import until_worker
from tests.support.processes import ROOT
from tests.support.requests import Load, greedy
from tests.support.waits import SOON_S, until_true

SCRIPTS = ROOT / "deploy/slurm"
PROGRAMS = Path(sys.executable).parent
CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=8, vocab_size=VOCAB_SIZE)
MODEL = "m"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Run a cluster for all tests of this file."""
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submit(slurm: Slurm, tasks: int, *arguments: str, **settings: str) -> str:
    """Submit a fleet of synthetic workers; return the job's id."""
    env = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "ROLLBUS_NAME": MODEL, **settings}
    engine = ("--engine", "synthetic", "--engine-args", json.dumps(msgspec.to_builtins(CONFIG)))
    # Without --mem=0 in the script, the first worker of a job would take all its memory.
    resources = (f"--ntasks={tasks}", "--mem=300")
    return slurm.call("sbatch", "--parsable", *resources, SCRIPTS / "fleet.sbatch", *engine, *arguments, env=env)


@pytest.mark.parametrize("script", sorted(SCRIPTS.iterdir()), ids=lambda path: path.name)
def test_the_scripts_are_sound(script: Path) -> None:
    """Bash can read each script, and shellcheck finds nothing in it."""
    for command in (["bash", "-n", str(script)], [str(PROGRAMS / "shellcheck"), str(script)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "ROLLBUS_NAME is not set"),
        ({"ROLLBUS_NAME": "m", "ROLLBUS_STOP_S": "2m"}, "ROLLBUS_STOP_S is '2m'; allowed: seconds as an integer"),
    ],
)
def test_a_wrong_setting_ends_the_job_at_once(settings: dict[str, str], problem: str) -> None:
    """The job ends with exit code 2 and names the variable."""
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "1", **settings}
    done = subprocess.run(["bash", SCRIPTS / "fleet.sbatch"], env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert problem in done.stderr


@pytest.mark.slow
async def test_nothing_is_lost_if_slurm_ends_a_worker_and_requeues_a_job(
    slurm: Slurm, nats_url: str, fleet: str
) -> None:
    """Slurm kills a step, whose worker starts again, and signals another job, which hands over and is requeued."""
    options = ("--fleet", fleet, "--lease-s", "3")
    jobs = [submit(slurm, tasks, *options, ROLLBUS_NATS=nats_url) for tasks in (2, 1)]
    async with rollbus.connect(nats_url, fleet=fleet, worker_grace_s=SOON_S) as rb:
        names = [f"{jobs[0]}-0-0", f"{jobs[0]}-0-1", f"{jobs[1]}-0-0"]
        before = [await until_worker(rb, name, WorkerState.SERVING) for name in names]

        async def kill_a_step() -> None:
            slurm.call("scancel", slurm.step_of(jobs[0], "worker-1"))

        async def preempt_a_job() -> None:
            slurm.call("scancel", "--batch", "--signal=USR1", jobs[1])

        load = await Load.lasting(40, CONFIG)
        await load.run(rb, strikes={4: kill_a_step, 8: preempt_a_job}, legs=3)

        killed = before[1]
        await until_worker(
            rb, names[1], lambda one: one.state is WorkerState.SERVING and one.incarnation != killed.incarnation
        )
        await until_true(lambda: slurm.state_of(jobs[1]) == ["PENDING", "1"])
        slurm.start_now(jobs[1])
        await until_worker(rb, f"{jobs[1]}-1-0", WorkerState.SERVING)
        # The other worker of the first job did not notice any of this.
        assert (await until_worker(rb, names[0], WorkerState.SERVING)).incarnation == before[0].incarnation
    assert "workers hand their requests over" in slurm.log(jobs[1])
    assert "exit code 137" in slurm.log(jobs[0])


@pytest.mark.slow
async def test_a_requeued_server_has_a_new_address(slurm: Slurm) -> None:
    """A trainer outside of the job finds the server of the job's present start, and none of an earlier start."""
    job = submit(slurm, 1, "--lease-s", "3")

    def environment() -> dict[str, str]:
        lines = slurm.call(SCRIPTS / "fleet-env", job, f"{SOON_S:.0f}").splitlines()
        return dict(line.split("=", 1) for line in lines)

    async def complete(found: dict[str, str], worker: str) -> None:
        async with rollbus.connect(found["ROLLBUS_NATS"], credentials=found["ROLLBUS_CREDS"]) as rb:
            await until_worker(rb, worker, WorkerState.SERVING)
            assert len((await rb.complete(greedy(1, 8))).token_ids) == 8

    first = environment()
    await complete(first, f"{job}-0-0")
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    await until_true(lambda: slurm.state_of(job) == ["PENDING", "1"])
    assert list((slurm.folder / "rollbus").iterdir()) == []

    # The file of an earlier start, as after the loss of the node.
    stale = slurm.folder / f"rollbus/{job}-0"
    stale.mkdir()
    (stale / "env").write_text("ROLLBUS_NATS=nats://gone:1\n")
    slurm.start_now(job)
    second = environment()
    await complete(second, f"{job}-1-0")

    assert second.keys() == first.keys()
    assert f"{job}-1/" in second["ROLLBUS_CREDS"]
    assert not stale.exists()
    assert "queue, desired state and stored weights are empty again" in slurm.log(job)
    slurm.call("scancel", job)
    await until_true(lambda: slurm.state_of(job)[:1] in ([], ["CANCELLED"]))
    assert list((slurm.folder / "rollbus").iterdir()) == []


@pytest.mark.slow
async def test_the_end_of_the_trainer_ends_the_job(slurm: Slurm) -> None:
    """A trainer in the job has the server's address and credentials of its own. Its exit code is that of the job."""
    job = submit(
        slurm,
        1,
        "--lease-s",
        "3",
        ROLLBUS_TRAINER="until rollbus status; do sleep 1; done; echo saw $ROLLBUS_CREDS; exit 7",
    )
    await until_true(lambda: slurm.state_of(job)[:1] == ["FAILED"])

    assert "ExitCode=7:0" in slurm.call("scontrol", "show", "job", job)
    assert f"/{job}-0/users/default/trainer-trainer.creds" in slurm.log(job)
    assert "worker.stopped" in slurm.log(job)
