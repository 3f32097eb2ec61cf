"""If a worker is frozen for longer than its lease, its requests run elsewhere, and its incarnation ends."""

import signal

import pytest

import rollbus
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.support.fleet_states import until_worker
from tests.support.invariants import observing
from tests.support.load import Load
from tests.support.waits import until
from tests.support.worker_process import LASTING, worker_process

LEASE = ("--lease-s", "2")
ENGINE_ARGS = {"step_s": 0.003, "max_num_seqs": 16, "vocab_size": VOCAB_SIZE}


@pytest.mark.proves("P2")
async def test_a_frozen_worker_gets_a_new_incarnation(nats_url: str, fleet: str) -> None:
    """A worker that is frozen under load and continues later gets a new incarnation and serves again.

    Every result is right.
    """
    load = await Load.lasting(80, SyntheticConfig.from_args(ENGINE_ARGS))
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "a", engine_args=ENGINE_ARGS) as a,
        worker_process(nats_url, fleet, *LASTING, "--worker-id", "b", engine_args=ENGINE_ARGS) as b,
    ):
        await rb.fleet.wait_for_workers(2)
        life = (await observer.presences())["a"].incarnation

        async def stop() -> None:
            a.send_signal(signal.SIGSTOP)

        results = await load.run(rb, strikes={10: stop})
        resumed = [generation for generation in results if generation.attempts > 1]
        assert resumed
        assert {generation.worker_ids[-1] for generation in resumed} == {"b"}

        a.send_signal(signal.SIGCONT)
        # The client marked the frozen worker lost. Its presence from before the freeze may arrive now.
        await until_worker(rb, "a", lambda worker: worker.incarnation != life and worker.state is WorkerState.SERVING)
        await observer.check_at_rest()
        b.terminate()
        assert await b.wait() == 0
        await until(observer.workers, {"a"})
        again = await load.run(rb)
        assert {generation.worker_ids for generation in again if generation.attempts == 1} == {("a",)}
        await observer.check_at_rest()
