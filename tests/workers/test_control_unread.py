"""A worker that cannot read the desired state, as on the small side of a partition, or reads an older one."""

import asyncio
import math
import time
from collections.abc import Callable

import pytest

from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.states import SPEAKING
from rollbus.schemas.errors import BusBroken
from rollbus.schemas.presence import WorkerState
from rollbus.workers.control import desired
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.requests import endless, short
from tests.support.waits import until_true
from tests.workers.support import StartControlled


def unanswered(store: DesiredStore, patches: pytest.MonkeyPatch) -> str:
    """Make reads fail, as if no server answered."""

    async def read(_model: str) -> None:
        await asyncio.sleep(0)
        raise BusBroken("nobody answers")

    patches.setattr(store, "read", read)
    return "nobody answers"


def unconfirmed(store: DesiredStore, patches: pytest.MonkeyPatch) -> str:
    """Make reads unconfirmed, as if a leader answered without its cluster."""

    async def confirmed_s() -> float:
        await asyncio.sleep(0)
        return 5.0

    patches.setattr(store, "confirmed_s", confirmed_s)
    return "too few servers of its cluster"


def outdated(store: DesiredStore, patches: pytest.MonkeyPatch) -> str:
    """Make reads return no state, as if a server was behind its cluster."""

    async def read(_model: str) -> None:
        await asyncio.sleep(0)

    patches.setattr(store, "read", read)
    return "behind its cluster"


@pytest.mark.proves("P82")
@pytest.mark.parametrize("part", [unanswered, unconfirmed, outdated])
async def test_a_worker_without_a_valid_desired_state_accepts_no_requests(
    controlled_worker: StartControlled,
    monkeypatch: pytest.MonkeyPatch,
    part: Callable[[DesiredStore, pytest.MonkeyPatch], str],
) -> None:
    """A worker without a valid desired state accepts no requests from the queue and no direct ones.

    Running requests continue. After the next valid read, the worker serves as before.
    """
    monkeypatch.setattr(desired, "RETRY_S", 0.01)
    async with controlled_worker() as (client, boss, worker, _):
        await boss.applied("resume")
        reader = worker._control.reader
        await client.begin(endless("runs"))
        with monkeypatch.context() as patches:
            problem = part(reader.store, patches)
            patches.setattr(reader, "_max_age_s", 0.1)
            await client.until_state("w", WorkerState.UPDATING)
            await client.until(lambda: problem in str(client.presences["w"].last_error))
            await client.enqueue(short("queued"))
            await client.hand_over(short("direct"), "w")
            await client.until_ended("direct")
            num_chunks = len(client.chunks["runs"])
            await client.until(lambda: len(client.chunks["runs"]) > num_chunks)
            assert client.error_of("direct") == "queue_full"
            assert client.offers == [("w", client.offers[0][1])]
        await client.until_serving("w")
        await client.until_ended("queued")
        await client.abort("w", *[key for _, key in client.offers])
        await until_true(lambda: worker.debug_state()["requests"] == 0)

        assert client.error_of("queued") is None
        assert client.presences["w"].last_error is None


@pytest.mark.proves("P18")
async def test_a_worker_that_starts_at_a_deposed_leader_serves_nothing(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker does not serve if the leader has lost its cluster while it started, however long its own lease is.

    The fleet may have loaded other weights since the leader lost its cluster, without waiting for this worker.
    """
    monkeypatch.setattr(desired, "RETRY_S", 0.01)
    with monkeypatch.context() as patches:
        heard_at = math.inf

        async def confirmed_s(_store: DesiredStore) -> float:
            nonlocal heard_at
            await asyncio.sleep(0)
            heard_at = min(heard_at, time.monotonic())
            return time.monotonic() - heard_at

        patches.setattr(DesiredStore, "confirmed_s", confirmed_s)
        async with (
            hand_client(nats_url, fleet) as client,
            synthetic_worker(nats_url, fleet, worker_id="w") as (worker, _),
        ):
            await until_true(lambda: worker.is_assembled and worker.presence().state in SPEAKING)
            look = worker._control.reader.request_read()
            await until_true(lambda: worker._control.reader.num_read >= look)
            assert worker.presence().state is WorkerState.UPDATING
            patches.undo()
            await client.until_serving("w")
