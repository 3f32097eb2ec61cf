"""Which roles may observe the commands of others, and that no other role can forge what they observe."""

from pathlib import Path

import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.client.client import watch_fleet
from rollbus.bus.nats.connection import publish, publish_permitted, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import Resume
from rollbus.schemas.errors import PermissionDenied
from tests.auth.support import FLEET, MODEL, guarded
from tests.control.support import ask as greedy
from tests.support.fleet import synthetic_worker
from tests.support.waits import until_true

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("watcher", "commander"), [("front", "boss"), ("boss", "front")])
async def test_an_admin_and_a_frontend_observe_commands_of_each_other(
    watcher: str, commander: str, tmp_path: Path
) -> None:
    """An admin and a frontend observe each other's commands and acks, which other roles cannot forge.

    They can also list the clients of waiting requests.
    """
    async with guarded(tmp_path) as guard:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with (
            worker,
            rollbus.connect(guard.login(watcher)) as rb,
            rollbus.connect(guard.login(commander)) as other,
            guard.connected("carol") as carol,
        ):
            watch = watch_fleet(rb)
            for each in (rb, other):
                await each.fleet.wait_for_workers()
            await watch.listen()
            told = await other.fleet.pause()
            while not (lines := await watch.commands()) or not lines[0].done:
                pass
            assert await watch.clients([MODEL]) == {}
            forged = b'{"id":"1","command":"pause","worker":"w0","incarnation":"","model":"m","status":"applied"}'
            with pytest.raises(PermissionDenied):
                await publish_permitted(carol, Subjects(FLEET).ack("boss", "w0"), forged)
            assert await watch.commands() == lines
            own = await rb.fleet.send(Resume())
            while len(lines := await watch.commands()) < 2 or not lines[0].done:
                pass
    assert [(line.id, line.controller, line.counts) for line in lines] == [
        (own.id, watcher, {"applied": 1}),
        (told.id, commander, {"applied": 1}),
    ]


@pytest.mark.parametrize("name", ["alice", "carol", "eye"])
async def test_other_roles_may_not_observe_commands(name: str, tmp_path: Path) -> None:
    """For other roles, observing commands fails with `PermissionDenied`, and the client's requests continue."""
    async with guarded(tmp_path) as guard:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with worker, rollbus.connect(guard.login(name)) as rb:
            await rb.fleet.wait_for_workers()
            watch = watch_fleet(rb)
            with pytest.raises(PermissionDenied) as listened:
                await watch.listen()
            with pytest.raises(PermissionDenied) as listed:
                await watch.clients([MODEL])
            if name != "eye":
                assert (await rb.complete(greedy())).error is None
            assert await watch.commands() == ()
    assert (listened.value.action, listened.value.subject) == ("subscribe", f"rb.v1.{FLEET}.ack.*.*")
    assert listed.value.action == "publish"


async def test_the_server_names_the_sender_of_each_ping(tmp_path: Path) -> None:
    """A ping has the name of its user, even if the user publishes the ping of an earlier release, which has no name."""
    subjects, received = Subjects(FLEET), []

    async def receive(message: Msg) -> None:
        received.append(message.subject)

    async with guarded(tmp_path) as guard, guard.connected("w0") as worker:
        for subject in (subjects.pings, subjects.ping):
            await subscribe(worker, subject, receive)
        await worker.flush()
        for name in ("alice", "eye", "front", "boss"):
            async with guard.connected(name) as nats:
                await publish(nats, subjects.ping_by(name), b"")
                if name != "boss":
                    await publish(nats, subjects.ping, b"")
                await nats.flush()
        expected = ["alice", "alice", "boss", "eye", "eye", "front", "front"]
        await until_true(lambda: sorted(received) == [subjects.ping_by(name) for name in expected])
        async with guard.connected("eye") as nats:
            with pytest.raises(PermissionDenied):
                await publish_permitted(nats, subjects.ping_by("alice"), b"")
