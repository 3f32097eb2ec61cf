"""A trainer reads only its own requests, a viewer only sums of experts, and nobody more by hand-made messages."""

import json
from pathlib import Path

import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.auth import permissions
from rollbus.bus.nats.connection import publish, publish_permitted, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import Pause, ReadRequest
from rollbus.schemas.errors import ControlCode, ControlError, PermissionDenied
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerState
from rollbus.workers.control.commands import OWN_READS_PER_S
from tests.auth.support import FLEET, MODEL, guarded
from tests.control.support import ask
from tests.support.fleet import synthetic_worker
from tests.support.presences import capabilities, presence
from tests.support.waits import until_true

pytestmark = pytest.mark.slow
SUBJECTS = Subjects(FLEET)


def ids(found: rollbus.RequestList) -> list[str]:
    """Return the ids of the listed requests."""
    return [each.request_id for each in found.timelines]


async def test_each_role_reads_its_own_requests(tmp_path: Path) -> None:
    """Trainers and publishers see only their own requests, frontends and admins all, and viewers only experts."""
    async with guarded(tmp_path) as guard:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        found = {}
        async with worker, rollbus.connect(guard.login("alice")) as alice:
            await alice.fleet.wait_for_workers()
            await alice.complete(ask(request_id="secret"))
            for name in ("alice", "bob", "carol", "front", "boss"):
                async with rollbus.connect(guard.login(name)) as rb:
                    await rb.fleet.wait_for_workers()
                    trace, listed = await rb.fleet.timelines("secret"), await rb.fleet.requests("slowest")
                    found[name] = len(trace.timelines), ids(listed), trace.silent | listed.silent
            with pytest.raises(ControlError, match="only its own requests, not those of bob") as of_bob:
                await alice.fleet.requests(client="bob")
            async with rollbus.connect(guard.login("eye")) as eye:
                await eye.fleet.wait_for_workers()
                experts = await eye.fleet.experts()
                with pytest.raises(ControlError, match=r"user eye \(role viewer\) may not read requests") as of_viewer:
                    await eye.fleet.requests()

        assert guard.violations() == []
    assert found == {
        **dict.fromkeys(("alice", "front", "boss"), (1, ["secret"], {})),
        **dict.fromkeys(("bob", "carol"), (0, [], {})),
    }
    assert {of_bob.value.code, of_viewer.value.code} == {ControlCode.NOT_ALLOWED}
    assert experts.num_workers == 1


@pytest.mark.proves("P25")
async def test_hand_made_reads_show_no_request_of_others(tmp_path: Path) -> None:
    """On the subject for reads, the worker ignores the named client, commands and large messages, and limits reads."""
    acks: list[dict[str, object]] = []

    async def receive(message: Msg) -> None:
        acks.append(json.loads(message.data))

    async with guarded(tmp_path) as guard:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with (
            worker as (asked, _),
            rollbus.connect(guard.login("alice")) as alice,
            guard.connected("bob") as bob,
            guard.connected("eye") as eye,
        ):
            await alice.fleet.wait_for_workers()
            await alice.complete(ask(request_id="secret"))
            for nats, name in ((bob, "bob"), (eye, "eye")):
                await subscribe(nats, SUBJECTS.acks_to(name), receive)
                for read in (ReadRequest(show="slowest", client="alice"), ReadRequest(request_id="secret")):
                    await publish(nats, SUBJECTS.read(name, "w0"), encode_json(read))
            await until_true(lambda: len(acks) == 4)
            assert [(ack["status"], ack["timelines"]) for ack in acks] == [("applied", [])] * 4

            rejected = asked._inbox.rejected.so_far
            for data in (encode_json(Pause(id="p")), b"\xc1", b" " * 5000, b'{"command":"read_request","id":"1"}'):
                await publish(bob, SUBJECTS.read("bob", "w0"), data)
            await until_true(lambda: asked._inbox.rejected.so_far == rejected + 4)
            with pytest.raises(PermissionDenied):
                await publish_permitted(bob, SUBJECTS.read("alice", "w0"), encode_json(ReadRequest(show="slowest")))
            acks.clear()
            for _ in range(4 * OWN_READS_PER_S):
                await publish(bob, SUBJECTS.read("bob", "w0"), encode_json(ReadRequest(show="running")))
            await until_true(lambda: len(acks) == 4 * OWN_READS_PER_S)
            assert "failed" in {ack["status"] for ack in acks}
            async with rollbus.connect(guard.login("boss")) as boss:
                await boss.fleet.wait_for_workers()
                assert ids(await boss.fleet.requests("slowest")) == ["secret"]
                assert boss.fleet.workers[0].state is WorkerState.SERVING


async def test_a_server_with_older_permissions_gives_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server lacks the permission to read, the error says how to renew the permissions."""
    rules = tuple(rule for rule in permissions.SUBJECT_RULES if not rule.subject.startswith("read."))
    with monkeypatch.context() as patch:
        patch.setattr(permissions, "SUBJECT_RULES", rules)
        server = guarded(tmp_path)
        guard = await server.__aenter__()
    try:
        async with guard.connected("w0") as worker, rollbus.connect(guard.login("alice")) as alice:
            one = presence(worker="w0", model=MODEL, lease_s=60.0, capabilities=capabilities(request_lists=True))
            await publish(worker, SUBJECTS.presence("w0"), encode_json(one))
            await until_true(lambda: alice.fleet.workers)
            with pytest.raises(ControlError, match="renew them with `rollbus auth init`") as denied:
                await alice.fleet.requests()
    finally:
        await server.__aexit__(None, None, None)

    assert denied.value.code is ControlCode.NOT_ALLOWED
    assert "user alice (role trainer) may not read telemetry" in denied.value.message
