"""The client without asyncio in processes that are interrupted, that fork, and that exit without leaving the client."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from typing import Any

from rollbus.bus.subjects import Subjects
from rollbus.schemas.messages import decode_client_presence
from tests.support.connections import opened
from tests.support.fleet import StartServed, until_idle
from tests.support.patience import SOON_S


async def run(program: str, url: str, fleet: str) -> list[Any]:
    """Run a program of `tests/support/sync_program.py` and return its output by line.

    The program must exit with 0 in time, without stderr output.
    """
    command = sys.executable, "-m", "tests.support.sync_program", program, url, fleet
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(SOON_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, err.decode()) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


async def test_workers_learn_immediately_that_a_program_exits(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """If a program exits without leaving its client, the workers learn immediately that its requests are abandoned."""
    async with one_worker() as (rb, _, engine), opened(nats_url) as connection:
        heard = await connection.subscribe(Subjects(fleet).client("program"))
        assert await run("leave_open", nats_url, fleet) == [1]
        states = [decode_client_presence((await heard.next_msg(SOON_S)).data).state]
        while states[-1] != "closed":
            states.append(decode_client_presence((await heard.next_msg(SOON_S)).data).state)
        await until_idle(engine, rb)


async def test_ctrl_c_ends_only_the_call(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Ctrl-C raises `KeyboardInterrupt` in each kind of call and ends its request. The client can use the ids again."""
    async with one_worker() as (rb, _, engine):
        [[interrupted, answers]] = await run("be_interrupted", nats_url, fleet)
        await until_idle(engine, rb)
    assert interrupted == ["complete", "complete_many", "generate", "groups", "wait_for_workers"]
    assert answers == ["length"] * 5


async def test_a_forked_process_cannot_use_the_client_of_its_parent(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """A forked child gets typed errors, has no connection, and can use its own client. The parent continues."""
    async with one_worker():
        child, parent = await run("fork", nats_url, fleet)
    assert child == {"errors": ["BusClosed"] * 9, "connections": 0, "own": 3}
    assert parent == {"code": 7, "tokens": [200, [20] * 60 + [3]], "missing": 0}


async def test_a_forked_process_cannot_use_a_client_with_asyncio(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """A fork has the same effect on a client with asyncio. A stream that the child reads ends with `client_closed`."""
    async with one_worker():
        child, parent = await run("fork_with_asyncio", nats_url, fleet)
    assert child == {"errors": ["BusClosed", "BusClosed", "RequestFailed"], "connections": 0}
    assert parent == {"code": 7, "tokens": [200, 3], "missing": 0}


async def test_forked_data_loader_processes_supply_prompts(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Two processes of a torch DataLoader supply prompts during requests, and cannot use the parent's client."""
    async with one_worker():
        [said] = await run("load_data", nats_url, fleet)
    assert said == {"errors": ["BusClosed"], "processes": 2, "results": 64}
