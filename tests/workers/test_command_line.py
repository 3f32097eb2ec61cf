"""The worker process says what is wrong with how it was started, and goes when its parent goes."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE

import pytest

import rollbus
from tests.support.patience import SOON_S
from tests.support.worker_process import worker_process

pytestmark = pytest.mark.slow

BAD_COMMAND_LINES = {
    "no model": (["--engine", "vllm"], "--model is needed"),
    "engine": (["--engine", "other"], "invalid choice: 'other'"),
    "worker id": (["--engine", "synthetic", "--worker-id", "a.b"], "worker_id is 'a.b'; allowed: 1 to"),
    "fleet": (["--engine", "synthetic", "--fleet", "a b"], "fleet is 'a b'; allowed: 1 to"),
    "weight version": (["--engine", "synthetic", "--weight-version", "-1"], "weight_version is -1; allowed"),
    "lease": (["--engine", "synthetic", "--lease-s", "1"], "lease_s is 1.0; allowed: a number from 2"),
    "engine timeout": (["--engine", "synthetic", "--engine-timeout-s", "0"], "engine_timeout_s is 0.0; allowed"),
    "engine args json": (["--engine", "synthetic", "--engine-args", "{"], "no JSON"),
    "engine args list": (["--engine", "synthetic", "--engine-args", "[]"], "not a JSON object"),
    "engine args name": (["--engine", "synthetic", "--engine-args", '{"foo": 1}'], "unknown field `foo`"),
}


@pytest.mark.parametrize("name", BAD_COMMAND_LINES)
async def test_bad_command_lines(name: str) -> None:
    """A bad argument ends the process with 2 and one line that names it and what is allowed."""
    arguments, message = BAD_COMMAND_LINES[name]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "rollbus.workers", *arguments, stderr=PIPE)
    _, stderr = await process.communicate()

    assert process.returncode == 2
    assert message in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_no_server_is_one_line() -> None:
    """Without a NATS server the process ends with 1 and says where it looked."""
    async with worker_process("nats://127.0.0.1:1", "default", stderr=PIPE) as process:
        _, stderr = await process.communicate()

    assert process.returncode == 1
    assert "no NATS server at nats://127.0.0.1:1" in stderr.decode().splitlines()[-1]


async def test_a_worker_goes_with_its_parent(nats_url: str, fleet: str) -> None:
    """When the pipe it was given closes, as it does when its parent dies, a worker stops in order."""
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
