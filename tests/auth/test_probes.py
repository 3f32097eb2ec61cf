"""Probes of the queues on a server with users: admins may publish them, and nothing else to a queue."""

from pathlib import Path

import msgspec
import pytest

import rollbus
from rollbus.bus.auth import permissions
from rollbus.bus.nats.jetstream import put
from rollbus.bus.queue.publisher import QueueProbes
from rollbus.bus.queue.streams import set_limits
from rollbus.bus.subjects import Subjects
from rollbus.schemas.messages import RequestMessage, encode
from tests.auth.support import FLEET, MODEL, guarded
from tests.support.fleet import synthetic_worker
from tests.support.requests import greedy
from tests.support.waits import until_true

pytestmark = pytest.mark.slow

SUBJECTS = Subjects(FLEET)


async def test_an_admin_finds_a_queue_that_stores_nothing(tmp_path: Path) -> None:
    """An admin gets the reason of a full queue. A viewer publishes no probe, and the server denies nothing."""
    async with guarded(tmp_path) as guard, guard.connected("boss") as boss, guard.connected("alice") as alice:
        await set_limits(boss, SUBJECTS, MODEL, {"max_msgs": 1})
        await put(alice, SUBJECTS.request("alice", MODEL, "low"), b"?")
        found = await QueueProbes(boss, SUBJECTS).problems("boss", [MODEL])
        async with guard.connected("eye") as eye:
            unknown = await QueueProbes(eye, SUBJECTS).problems("eye", [MODEL])

        assert "maximum messages exceeded" in found[MODEL]
        assert unknown == {}
        assert guard.violations() == []


@pytest.mark.parametrize("is_earlier", [False, True])
async def test_workers_remove_the_probes_of_an_admin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    """Workers ack an admin's probes. A server that an earlier release configured denies one probe, and gets no more."""
    if is_earlier:
        rules = tuple(rule for rule in permissions.SUBJECT_RULES if "~probe" not in rule.subject)
        monkeypatch.setattr(permissions, "SUBJECT_RULES", rules)
    async with guarded(tmp_path) as guard:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with worker as (serving, _), rollbus.connect(guard.login("boss")) as rb:
            await rb.fleet.wait_for_workers()
            assert await rb.fleet.check_queues() == {}
            assert await rb.fleet.check_queues() == {}
            expected = 0 if is_earlier else 4
            await until_true(lambda: serving._puller.stats.probes == expected)

            assert serving.stats().intake.bad == 0
            assert len(guard.violations()) == is_earlier


async def test_an_admin_sends_no_requests_as_probes(tmp_path: Path) -> None:
    """Workers reject a request on the subject of probes, whatever client it names, and serve a trainer as before."""
    async with guarded(tmp_path) as guard, guard.connected("boss") as boss:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with worker as (serving, _), rollbus.connect(guard.login("alice")) as rb:
            await rb.fleet.wait_for_workers()
            request = msgspec.Raw(encode(greedy(1, 2)))
            for client in (b"boss", b"alice", b"~probe"):
                # Programs of an attacker check no names.
                data = encode(RequestMessage(client="x" * len(client), incarnation="i", request=request))
                await put(boss, SUBJECTS.probe(MODEL, "normal"), data.replace(b"x" * len(client), client))
            await until_true(lambda: serving.stats().intake.bad == 3)

            assert serving.stats().links.requests == 0
            assert (await rb.complete(greedy(1, 2))).error is None
            assert serving._puller.stats.probes == 0
