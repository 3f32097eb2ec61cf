"""Floods of messages that any client may publish: the worker keeps its lease, serves, and names the sender."""

import asyncio
import contextlib
import sys
import textwrap
from collections.abc import AsyncIterator

import pytest

import rollbus
from rollbus.bus.subjects import Subjects
from tests.support.fleet import synthetic_worker
from tests.support.patience import SOON_S
from tests.support.requests import short
from tests.support.waits import until_true

FLOOD = textwrap.dedent("""
    import json, socket, sys, time
    host, port, subject, data = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4].encode()
    nats = socket.create_connection((host, port))
    nats.sendall(b'CONNECT {"verbose":false}\\r\\n')
    message = b"PUB %b %d\\r\\n%b\\r\\n" % (subject.encode(), len(data), data)
    while True:
        nats.sendall(message * 300)
        time.sleep(0.01)
""")
"""Publishes 30,000 messages a second, until it is killed."""


@contextlib.asynccontextmanager
async def flooding(url: str, subject: str, data: str) -> AsyncIterator[None]:
    """Flood a subject from another process."""
    host, _, port = url.removeprefix("nats://").partition(":")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, host, port, subject, data)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.mark.proves("P63")
@pytest.mark.parametrize("kind", ["named", "ping", "direct", "presence"])
async def test_a_flood_fences_no_worker_and_its_sender_is_named(nats_url: str, fleet: str, kind: str) -> None:
    """While a program publishes 30,000 messages a second, the worker keeps its lease and serves.

    Its presence names the subject, which has the name of the sender.
    """
    subjects = Subjects(fleet)
    subject = {
        "named": subjects.ping_by("mallory"),
        "ping": subjects.ping,
        "direct": subjects.direct("mallory", "w"),
        "presence": subjects.client("mallory"),
    }[kind]
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w", lease_s=2.0) as (worker, _),
        rollbus.connect(nats_url, fleet=fleet) as rb,
        asyncio.timeout(3 * SOON_S),
    ):
        await rb.fleet.wait_for_workers(1)
        async with flooding(nats_url, subject, "x" * 20):
            await until_true(lambda: worker.presence().last_error)
            until_s, number = worker.presence().uptime_s + 2.5, 0
            while worker.presence().uptime_s < until_s:  # longer than the lease
                await rb.complete(short(f"r{number}"))
                number += 1
            problem = worker.presence().last_error or ""
            async with rollbus.connect(nats_url, fleet=fleet) as late:
                await late.complete(short("late"))

    assert subject in problem
    assert worker.stats().times_fenced == 0
