"""The worker process reports invalid arguments, and exits when its parent exits."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

import rollbus
from rollbus.bus.auth.credentials import Role
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.workers import __main__ as main
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.nats_server import require_binary
from tests.support.patience import HANGS_AFTER_S, SOON_S
from tests.support.tcp_proxy import tcp_proxy
from tests.support.worker_process import worker_process

pytestmark = pytest.mark.slow

BAD_COMMAND_LINES = {
    "no model": (["--engine", "vllm"], "--model is required"),
    "engine": (["--engine", "other"], "invalid choice: 'other'"),
    "worker id": (["--engine", "synthetic", "--worker-id", "a.b"], "worker_id is 'a.b'; allowed: 1 to"),
    "fleet": (["--engine", "synthetic", "--fleet", "a b"], "fleet is 'a b'; allowed: 1 to"),
    "weight version": (
        ["--engine", "synthetic", "--weight-version", "-1"],
        "'-1' is not an integer of at least 0",
    ),
    "lease": (["--engine", "synthetic", "--lease-s", "1"], "lease_s is 1.0; allowed: a number from 2"),
    "engine timeout": (
        ["--engine", "synthetic", "--engine-timeout-s", "0"],
        "'0' is not a duration above 0",
    ),
    "engine args json": (["--engine", "synthetic", "--engine-args", "{"], "--engine-args: not JSON: "),
    "engine args list": (["--engine", "synthetic", "--engine-args", "[]"], "--engine-args: not a JSON object"),
    "engine args name": (["--engine", "synthetic", "--engine-args", '{"foo": 1}'], "unknown field `foo`"),
}


@pytest.mark.parametrize("name", BAD_COMMAND_LINES)
async def test_a_bad_argument_ends_the_worker_with_exit_code_2(name: str) -> None:
    """A bad argument ends the process with exit code 2 and one line with the argument and the allowed values."""
    arguments, message = BAD_COMMAND_LINES[name]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "rollbus.workers", *arguments, stderr=PIPE)
    _, stderr = await process.communicate()

    assert process.returncode == 2
    assert message in stderr.decode()
    assert "Traceback" not in stderr.decode()


def stderr_of(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    """Return the process's stderr."""
    if process.stderr is None:
        raise RuntimeError("its stderr is not read")
    return process.stderr


async def test_without_a_server_a_worker_waits_for_the_server(nats_url: str, fleet: str) -> None:
    """Without a server, a worker logs one line and waits. It serves as soon as the server runs."""
    async with tcp_proxy(nats_url) as proxy, asyncio.timeout(HANGS_AFTER_S):
        proxy.cut()
        async with worker_process(proxy.url, fleet, stderr=PIPE) as process:
            line = await stderr_of(process).readline()
            await proxy.restore()
            async with rollbus.connect(nats_url, fleet=fleet) as rb:
                await rb.fleet.wait_for_workers(timeout_s=SOON_S)
            process.terminate()
            rest = await stderr_of(process).read()
            assert await process.wait() == 0

    assert f"worker.server_awaited error=no NATS server at {proxy.url}" in line.decode()
    assert b"server_awaited" not in rest


async def test_a_worker_tries_again_until_it_has_connected(nats_url: str, fleet: str) -> None:
    """If no server answers at the first attempt, the worker tries again and serves without a restart."""
    async with tcp_proxy(nats_url) as proxy, asyncio.timeout(HANGS_AFTER_S), asyncio.TaskGroup() as tasks:
        proxy.cut()
        config = WorkerConfig(nats_url=proxy.url, fleet=fleet, worker_id="w", model="m", listen_s=0)
        workers: list[Worker] = []

        def make() -> Worker:
            workers.append(Worker(config, SyntheticEngine(SyntheticConfig())))
            if len(workers) == 2:  # the first attempt has failed
                tasks.create_task(proxy.restore())
            return workers[-1]

        tasks.create_task(main.serve(config, make))
        async with rollbus.connect(nats_url, fleet=fleet) as rb:
            await rb.fleet.wait_for_workers(timeout_s=SOON_S)
        workers[-1].stop()

    assert len(workers) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_a_worker_that_waits_for_a_server(number: signal.Signals) -> None:
    """A signal ends a waiting worker with exit code 0, as it ends a serving worker."""
    async with worker_process("nats://127.0.0.1:1", "f", stderr=PIPE) as process, asyncio.timeout(HANGS_AFTER_S):
        await stderr_of(process).readline()
        process.send_signal(number)
        assert await process.wait() == 0


async def test_a_worker_with_rejected_credentials_exits_without_a_wait(tmp_path: Path) -> None:
    """If the server rejects its credentials, a worker does not wait: it prints the remedy and exits with 1."""
    require_binary()
    [entry] = ensure_users(tmp_path, [("f", Role.WORKER, "w")])
    async with (
        EmbeddedServer(users=[entry.user]) as server,
        worker_process(server.url, "f", stderr=PIPE) as process,
        asyncio.timeout(HANGS_AFTER_S),
    ):
        _, stderr = await process.communicate()

    assert process.returncode == 1
    [line] = stderr.decode().splitlines()
    assert "it received no credentials: set --creds FILE" in line


async def test_a_worker_stops_with_its_parent(nats_url: str, fleet: str) -> None:
    """A worker stops in order when the pipe of its parent closes, as it does at the parent's death."""
    read_end, write_end = os.pipe()
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollbus.workers", "--nats", nats_url, "--fleet", fleet),
            *("--engine", "synthetic", "--parent-pipe", str(read_end)),
            pass_fds=[read_end],
        )
        os.close(read_end)
        try:
            await rb.fleet.wait_for_workers()
        finally:
            os.close(write_end)
        async with asyncio.timeout(SOON_S):
            assert await process.wait() == 0
