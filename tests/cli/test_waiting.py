"""New requests while `up` restarts the only worker, on the bus and over HTTP."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import rollbus
from rollbus.frontend.cli.exits import CommandFailed, cause_of
from rollbus.frontend.cli.local.display import FleetObserver
from rollbus.frontend.cli.local.fleet import LocalFleet, local_users, run_fleet
from rollbus.frontend.cli.local.processes import RestartRule
from rollbus.schemas.errors import NoWorkers
from rollbus.schemas.presence import WorkerState
from tests.cli.support import processes_with, running_up
from tests.support.requests import greedy
from tests.support.waits import HANGS_AFTER_S, SOON_S, busy_timeout, until_true

pytestmark = pytest.mark.slow

COUNT = 50


def kill_worker(url: str) -> None:
    """Kill the process of the only worker with SIGKILL."""
    (pid,) = processes_with("--worker-id local-0", url)
    os.kill(pid, signal.SIGKILL)


async def test_new_requests_wait_while_up_restarts_its_only_worker(tmp_path: Path) -> None:
    """After SIGKILL of the only worker, 50 new requests on the bus and 50 over HTTP end whole on the next process.

    So does a request in flight. Meanwhile, presence shows the worker as starting, with the number of the restart.
    """
    options = ("--engine", "synthetic", "--engine-args", '{"step_s": 0.02}', "--http", "127.0.0.1:0")
    with running_up(*options, log=tmp_path / "log") as (_, info):
        async with (
            rollbus.connect(info["nats"]) as rb,
            httpx.AsyncClient(base_url=info["http"], timeout=HANGS_AFTER_S) as http,
            asyncio.TaskGroup() as tasks,
        ):
            await rb.fleet.wait_for_workers()
            stream = rb.generate(greedy(1, 100))
            chunks = [await anext(stream)]
            kill_worker(info["nats"])
            await until_true(lambda: [worker.state for worker in rb.fleet.workers] == [WorkerState.STARTING])
            assert "restart 1 of 5" in str(rb.fleet.workers[0].last_error)
            on_bus = [tasks.create_task(rb.complete(greedy(i, 5))) for i in range(COUNT)]
            body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "ignore_eos": True}}
            by_http = [tasks.create_task(http.post("/inference/v1/generate", json=body)) for _ in range(COUNT)]
            generations, answers = [await task for task in on_bus], [await task for task in by_http]
            chunks += [chunk async for chunk in stream]

    assert "duplicate" not in (tmp_path / "log").read_text()
    assert (sum(chunk.num_tokens for chunk in chunks), {chunk.attempt for chunk in chunks}) == (100, {0, 1})
    assert [len(generation.token_ids) for generation in generations] == [5] * COUNT
    assert [len(answer.json()["choices"][0]["token_ids"]) for answer in answers] == [5] * COUNT


@contextlib.asynccontextmanager
async def fleet_of_one(tmp_path: Path, rule: RestartRule) -> AsyncIterator[tuple[rollbus.Client, str]]:
    """Run a fleet with users and one worker in this process. Yield a trainer's client and the server's URL.

    The block must end the fleet: afterwards, this expects that its last worker was given up.
    """
    users = local_users(tmp_path, "default", ["local-0"])
    flags = ("--engine", "synthetic")
    fleet = LocalFleet(served_model="synthetic", worker_flags=flags, restarts=rule, users=users)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with run_fleet(fleet, FleetObserver(shows_logs=False)) as server:
            url.set_result(server.url)
            await asyncio.Event().wait()

    async def until_given_up() -> BaseExceptionGroup[BaseException]:
        with pytest.raises(ExceptionGroup) as caught:
            await run()
        return caught.value

    async with busy_timeout(SOON_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(until_given_up())
        trainer = users.others["trainer"]
        async with rollbus.connect(await url, credentials=trainer, worker_grace_s=3600) as rb:
            await rb.fleet.wait_for_workers()
            yield rb, await url
        error = cause_of(await running)
    assert isinstance(error, CommandFailed)


async def test_waiting_requests_fail_when_up_has_given_up(tmp_path: Path) -> None:
    """A worker that is killed at each start holds requests until `up` gives up. Then they fail with the last cause."""
    async with (
        fleet_of_one(tmp_path, RestartRule(first_delay_s=0.5, max_restarts=1)) as (rb, url),
        asyncio.TaskGroup() as tasks,
    ):
        (first,) = processes_with("--worker-id local-0", url)
        kill_worker(url)
        await until_true(lambda: [worker.state for worker in rb.fleet.workers] == [WorkerState.STARTING])
        # No weights have this version, so no process serves the requests before it is killed.
        asked = [greedy(i, 5, min_weight_version=9) for i in range(COUNT)]
        waiting = [tasks.create_task(_failing(rb, request)) for request in asked]
        await until_true(lambda: processes_with("--worker-id local-0", url) not in ([], [first]))
        kill_worker(url)
        messages = {await task for task in waiting}

    killed = "was killed by SIGKILL (out of memory? `dmesg` shows it)"
    cause = f"local-0 is not started again: {killed} (1 of 1 restarts in 10 minutes)"
    assert messages == {f"no worker serves synthetic, and none starts ({cause})"}


async def _failing(rb: rollbus.Client, request: rollbus.GenerateRequest) -> str:
    with pytest.raises(NoWorkers) as caught:
        await rb.complete(request)
    return str(caught.value.message)
