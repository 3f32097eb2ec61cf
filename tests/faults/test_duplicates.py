"""If two workers have one id, one of them exits and names the other process, and no request hangs."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import rollbus
from rollbus.bus.nats.server import Server
from rollbus.bus.protocol.fleet.leases import TIE_S
from rollbus.schemas.errors import EXIT_DUPLICATE_WORKER
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.lifecycle import WorkerLifecycle
from tests.auth.support import FLEET, MODEL, guarded
from tests.chaos.workload import VOCAB_SIZE
from tests.control.support import ask
from tests.support.disagg import SHAPES, check_legs, filtered
from tests.support.fleet import StartServed, synthetic_worker, until_state
from tests.support.invariants import observing
from tests.support.nats_server import NatsNoise
from tests.support.processes import LASTING, worker_process
from tests.support.requests import Load
from tests.support.waits import until_true

SLOW = {"step_s": 0.05}
"""For requests that follow one another during seconds."""
CONFIG = SyntheticConfig(step_s=0.002, max_num_seqs=4, vocab_size=VOCAB_SIZE)
SAME = ("--worker-id", "same", "--served-model-name", MODEL, "--lease-s", "6", "--listen-s", "2")
LIMIT_S = 60


@contextlib.asynccontextmanager
async def requesting(rb: rollbus.Client) -> AsyncIterator[list[int]]:
    """Send one request after the other during the block, at least one, and yield the list of their attempts."""
    attempts: list[int] = []

    async def send() -> None:
        while True:
            generation = await rb.complete(ask(max_tokens=3))
            assert generation.error is None
            attempts.append(generation.attempts)

    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send())
        yield attempts
        attempts.append((await rb.complete(ask(max_tokens=3))).attempts)
        sending.cancel()


async def holder(rb: rollbus.Client, process: Process) -> WorkerPresence:
    """Return the presence of this process when it is the only worker of the fleet and serves."""
    async with asyncio.timeout(LIMIT_S):
        held = [(process.pid, WorkerState.SERVING)]
        state = await until_state(rb, lambda state: [(one.pid, one.state) for one in state.workers] == held)
    return state.workers[0]


async def error_of(process: Process) -> str:
    """Return the stderr output of a worker that exits because of a duplicate id."""
    async with asyncio.timeout(LIMIT_S):
        written = (await process.stderr.read()).decode()
        assert await process.wait() == EXIT_DUPLICATE_WORKER
    return written


@pytest.mark.proves("P4")
@pytest.mark.parametrize("is_guarded", [False, True])
async def test_a_second_worker_with_the_same_id_exits(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_guarded: bool
) -> None:
    """A second worker of an id exits with its own exit code and names the first worker's host, pid and start.

    No request is affected.
    """
    async with contextlib.AsyncExitStack() as stack:
        server, options, fleet = Server(nats_url), (*SAME, *LASTING), tmp_path.name
        if is_guarded:
            guard, fleet = await stack.enter_async_context(guarded(tmp_path)), FLEET
            server, options = guard.login("alice"), (*SAME[2:], *LASTING, "--creds", str(guard.path("w0")))
        process = await stack.enter_async_context(worker_process(server.url, fleet, *options, engine_args=SLOW))
        rb = await stack.enter_async_context(rollbus.connect(server, fleet=fleet))
        first = await holder(rb, process)
        async with requesting(rb) as attempts:
            async with worker_process(server.url, fleet, *options, stderr=PIPE) as second:
                error = await error_of(second)
            assert (await holder(rb, process)).incarnation == first.incarnation
        lost = rb.stats().attempts_lost

    assert (
        f"worker id {first.worker} is in use by another process: host {first.host}, pid {first.pid}, started 2" in error
    )
    assert first.pid not in (second.pid, None)
    assert set(attempts) == {1}
    assert lost == 0


@pytest.mark.proves("P4")
async def test_exactly_one_of_two_workers_that_start_with_one_id_exits(nats_url: str, fleet: str) -> None:
    """If two workers with one id start together, exactly one exits, and clients know the remaining one immediately."""
    async with (
        worker_process(nats_url, fleet, *SAME) as one,
        worker_process(nats_url, fleet, *SAME) as other,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        asyncio.timeout(LIMIT_S),
    ):
        async with asyncio.TaskGroup() as tasks:
            waiting = {tasks.create_task(process.wait()): process for process in (one, other)}
            (ended,), (left,) = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
        await holder(rb, waiting[left])
        async with requesting(rb):
            pass

        assert ended.result() == EXIT_DUPLICATE_WORKER
        assert waiting[left].returncode is None


@pytest.mark.proves("P4")
async def test_a_stopped_worker_exits_if_another_worker_has_its_id_meanwhile(nats_url: str, fleet: str) -> None:
    """After SIGSTOP for longer than its lease, a worker exits if another worker has its id meanwhile."""
    async with (
        worker_process(nats_url, fleet, *SAME, stderr=PIPE) as first,
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await holder(rb, first)
        os.kill(first.pid, signal.SIGSTOP)
        # The second worker serves after it has listened for a lease, so the lease of the first has expired.
        listening = worker_process(nats_url, fleet, *SAME, "--listen-s", "6", engine_args=SLOW)
        async with listening as second, asyncio.timeout(LIMIT_S):
            while ((await holder(rb, second)).held_s or 0) <= TIE_S:
                pass
            async with requesting(rb):
                os.kill(first.pid, signal.SIGCONT)
                error = await error_of(first)
            assert second.returncode is None
            assert f"pid {second.pid}," in error


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_worker_can_restart_with_its_id_immediately(nats_url: str, fleet: str, how: signal.Signals) -> None:
    """A worker can restart with its id immediately after the previous process was killed or stopped."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb, worker_process(nats_url, fleet, *SAME) as first:
        await holder(rb, first)
        first.send_signal(how)
        async with worker_process(nats_url, fleet, *SAME) as second, asyncio.timeout(LIMIT_S):
            await holder(rb, second)
            async with requesting(rb):
                pass
            assert second.returncode is None


async def test_two_workers_with_one_id_and_no_check_complete_all_requests(
    nats_url: str, fleet: str, one_worker: StartServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of earlier releases do not check for duplicate ids. All requests of both workers complete."""

    async def ignore_message(_self: WorkerLifecycle, _message: object) -> None:
        return

    monkeypatch.setattr(WorkerLifecycle, "receive_presence", ignore_message)
    load = await Load.mixed(40, CONFIG)
    async with (
        one_worker(config=CONFIG, worker_id="same") as (rb, one, _),
        asyncio.timeout(LIMIT_S),
        synthetic_worker(nats_url, fleet, config=CONFIG, worker_id="same") as (other, _),
    ):
        # The lifecycle exists only after the worker has connected.
        await until_true(lambda: other.is_assembled and other.debug_state()["state"] == "serving")
        await load.run(rb)
        served = [worker.stats().links.requests for worker in (one, other)]

    assert min(served) > 0


# The frame numbers of a link repair frames and acks that are lost, duplicate or reordered.


NOISY_CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=16, vocab_size=VOCAB_SIZE)


@pytest.mark.proves("P33")
@pytest.mark.parametrize("shape", SHAPES)
async def test_lost_duplicate_or_late_frames_and_acks_cost_no_attempt(nats_url: str, fleet: str, shape: str) -> None:
    """If frames or frame acks are lost, duplicate or late, each request is right in its first attempt."""
    load = await Load.mixed(50, NOISY_CONFIG)
    frames = NatsNoise(r"\.frame\.", seed=1, drop=0.01, double=0.02, delay=0.01)
    acks = NatsNoise(r"\.link\.", seed=2, drop=0.1, double=0.1)
    async with (
        observing(nats_url, fleet) as observer,
        filtered(nats_url, fleet, shape, NOISY_CONFIG, client=frames.filter, workers=acks.filter) as (
            running,
            rb,
        ),
    ):
        results = await load.run(rb, legs=len(running.workers))
        stats = rb.stats()

        check_legs(results, shape)
        assert {generation.attempts for generation in results} == {1}
        assert set(frames.counts) == {"dropped", "doubled", "delayed"}
        assert set(acks.counts) == {"dropped", "doubled"}
        assert stats.missing_frames > 0
        assert stats.duplicate_frames > 0
        await observer.check_at_rest()
