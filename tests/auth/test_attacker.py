"""A user may do nothing beyond its role, on each subject of the permission table and on each service of NATS."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.auth import permissions
from rollbus.bus.auth.credentials import Role, load_credentials
from rollbus.bus.auth.permissions import SUBJECT_RULES
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import check_permitted, open_connection, publish, publish_permitted, subscribe
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.bus.queue.streams import stream_name
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import Pause, ReadRequest
from rollbus.schemas.errors import BusBroken, ControlCode, ControlError, PermissionDenied
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerState
from rollbus.workers.control.commands import OWN_READS_PER_S
from tests.auth.support import FLEET, MODEL, Guarded, guarded
from tests.control.support import ask as greedy
from tests.support.fleet import capabilities, presence
from tests.support.waits import SOON_S, until_true

pytestmark = pytest.mark.slow


USERS = {
    Role.TRAINER: "alice",
    Role.PUBLISHER: "carol",
    Role.WORKER: "w0",
    Role.FRONTEND: "front",
    Role.ADMIN: "boss",
    Role.VIEWER: "eye",
}
"""The user of each role whose credentials the attacker has."""
OTHERS = {"<client>": "bob", "<controller>": "bob", "<worker>": "w1"}
"""Users under whose names the attacker tries to publish and to subscribe."""
FIXED = {"<model>": MODEL, "<lane>": "normal"}
T, P, W, F, A, V = Role.TRAINER, Role.PUBLISHER, Role.WORKER, Role.FRONTEND, Role.ADMIN, Role.VIEWER
EVERY_CLIENT = {T, P, F, A, V}

# The expected permissions, written by hand: a new subject or a new right must be added to this table as well. Each row:
# the roles that may publish under their own name, and the roles that may subscribe to messages for themselves.
# `OBSERVED` has the roles that may subscribe to messages for others.
OWN: dict[str, tuple[set[Role], set[Role]]] = {
    "req.<client>.<model>.<lane>": ({T, P, F}, set()),
    "req.~probe.<model>.<lane>": ({A}, set()),
    "direct.<client>.<worker>": ({T, P, F}, {W}),
    "frame.<client>.<worker>": ({W}, EVERY_CLIENT),
    "link.<client>.<worker>": ({T, P, F}, {W}),
    "plain.<client>.>": ({W}, {T, P, F}),
    "presence.<worker>": ({W}, EVERY_CLIENT | {W}),
    "client.<client>": (EVERY_CLIENT, EVERY_CLIENT | {W}),
    "control.<controller>": ({A, P, F}, {W}),
    "read.<client>.<worker>": ({T, P, V}, {W}),
    "ack.<controller>.<worker>": ({W}, EVERY_CLIENT),
    "service.<client>": ({F}, {F}),
    "ping.<client>": (EVERY_CLIENT, {W}),
    "ping": (EVERY_CLIENT, {W}),
}
HEARD_BY_ALL = {"presence.<worker>"}
"""Subjects that clients receive from every worker."""
OBSERVED = {"ack.<controller>.<worker>": {A, F}, "presence.<worker>": {W}, "service.<client>": {F}}
"""The roles that may subscribe to messages for others: of acks those that may send any command, of presence workers.
HTTP services hear each other."""


def subject(kind: str, names: dict[str, str]) -> str:
    """Return a subject of this kind with these names."""
    for placeholder, name in (FIXED | names).items():
        kind = kind.replace(placeholder, name)
    return f"rb.v1.{FLEET}." + kind.replace(".>", ".x")


def cases(role: Role) -> Iterator[tuple[str, str, bool]]:
    """Yield each operation that the attacker tries: its action, its subject and True if the role may do it."""
    own = USERS[role]
    mine = {"<worker>": own} if role is W else {"<client>": own, "<controller>": own}
    theirs = {place for place in OTHERS if place not in mine}
    for kind, (publishers, hearers) in OWN.items():
        names_me = any(place in kind for place in mine)
        is_observed = role in OBSERVED.get(kind, ())
        is_for_all = role is not W and (kind in HEARD_BY_ALL or is_observed)
        for names in (OTHERS | mine, OTHERS):
            is_me = names is not OTHERS
            if not is_me and not names_me:
                continue  # this subject contains no name and was yielded already
            where = subject(kind, names)
            yield "publish", where, role in publishers and is_me
            yield "subscribe", where, is_observed or (role in hearers and (is_me or is_for_all))
        wide = subject(kind, dict.fromkeys(OTHERS, "*") | {"<model>": "*", "<lane>": "*"})
        everybody = not names_me or is_for_all
        yield "subscribe", wide, is_observed or (role in hearers and everybody and bool(theirs))


async def may(guard: Guarded, name: str, action: str, where: str) -> bool:
    """Return True if the server permits this operation to the user."""

    async def ignore(_message: Msg) -> None:
        return

    async with guard.connected(name) as nats:  # a new connection, because a connection remembers earlier denials
        try:
            if action == "publish":
                await publish_permitted(nats, where, b"\xc1")
            else:
                await subscribe(nats, where, ignore)
                await check_permitted(nats)
        except PermissionDenied as error:
            assert (error.action, error.subject) == (action, where)
            assert name in str(error)
            return False
        return True


def test_every_subject_has_an_expected_permission() -> None:
    """Each subject of the software has an expected permission in `OWN`."""
    assert list(OWN) == [rule.subject for rule in SUBJECT_RULES]


@pytest.mark.proves("P25")
async def test_each_role_can_do_exactly_its_operations_under_its_own_name(tmp_path: Path) -> None:
    """A role can do exactly its operations under its own name, and none under the name of another user."""
    async with guarded(tmp_path) as guard:
        for role, name in USERS.items():
            found = {(action, where): await may(guard, name, action, where) for action, where, _ in cases(role)}
            assert found == {(action, where): allowed for action, where, allowed in cases(role)}


NEVER = [
    *("_INBOX.>", "_INBOX_trainer.bob.>", "_INBOX_trainer.>", "_INBOX_frontend.front2.>", ">", "rb.>", "rb.v1.>"),
    *(f"rb.v1.{FLEET}.>", f"rb.v1.{FLEET}.frame.>", "rb.v1.other.presence.*", "$SYS.>", "$JS.>", "$JS.EVENT.>", "$O.>"),
    *("$KV.>", "$KV.rollbus.>", "$JS.API.>", "$JS.ACK.>"),
]


async def test_no_role_may_subscribe_to_a_wide_wildcard(tmp_path: Path) -> None:
    """No role may subscribe to a wide wildcard or to the answers of another user."""
    async with guarded(tmp_path) as guard:
        found = [(name, at) for name in USERS.values() for at in NEVER if await may(guard, name, "subscribe", at)]

    assert found == []


def operations(stream: str) -> Iterator[tuple[str, set[Role]]]:
    """Yield the JetStream operations on a queue and on the buckets, with the roles that may use each operation."""
    api = "$JS.API"
    yield f"{api}.STREAM.MSG.GET.{stream}", set()
    yield f"{api}.DIRECT.GET.{stream}", set()
    yield f"{api}.DIRECT.GET.{stream}.rb.v1.{FLEET}.req.bob.{MODEL}.normal", set()
    yield f"{api}.STREAM.DELETE.{stream}", {A}
    yield f"{api}.STREAM.PURGE.{stream}", set()
    yield f"{api}.STREAM.MSG.DELETE.{stream}", set()
    yield f"{api}.STREAM.SNAPSHOT.{stream}", set()
    yield f"{api}.STREAM.RESTORE.{stream}", set()
    yield f"{api}.STREAM.NAMES", set()
    yield f"{api}.STREAM.INFO.{stream}", {A, F}
    yield f"{api}.STREAM.LIST", {A}
    yield f"{api}.STREAM.CREATE.spy", {A}
    yield f"{api}.STREAM.UPDATE.{stream}", {A}
    yield f"{api}.CONSUMER.CREATE.{stream}", set()
    yield f"{api}.CONSUMER.CREATE.{stream}.spy", {A}
    yield f"{api}.CONSUMER.CREATE.{stream}.spy.rb.v1.{FLEET}.req.bob.{MODEL}.normal", set()
    yield f"{api}.CONSUMER.DURABLE.CREATE.{stream}.spy", set()
    yield f"{api}.CONSUMER.DELETE.{stream}.normal", set()
    yield f"{api}.CONSUMER.PAUSE.{stream}.normal", set()
    yield f"{api}.CONSUMER.MSG.NEXT.{stream}.normal", {W}
    yield f"$JS.ACK.{stream}.normal.1.1.1.1.0", {W}
    yield f"$KV.rollbus.{FLEET}.{MODEL}", {A, P, F}
    yield f"$KV.rollbus.{FLEET}.other", {A, F}
    yield "$KV.rollbus.other.m", set()
    yield f"{api}.STREAM.PURGE.KV_rollbus", {A}
    yield f"{api}.STREAM.DELETE.KV_rollbus", {A}
    yield f"{api}.STREAM.PURGE.OBJ_rollbus-{FLEET}", {A}
    yield f"$O.rollbus-{FLEET}.C.x", {A}
    yield f"$O.rollbus-{FLEET}.M.x", {A}
    own, daves = (f"rollbus-{FLEET}-{digest}" for digest in ("62c66a7a5dd70c31", "ccdd35168ab474fa"))
    for bucket, publishers in ((own, {P}), (daves, set[Role]())):
        yield f"$O.{bucket}.C.x", {A} | publishers
        yield f"$O.{bucket}.M.x", {A} | publishers
        yield f"{api}.STREAM.PURGE.OBJ_{bucket}", {A} | publishers
        yield f"{api}.STREAM.INFO.OBJ_{bucket}", {A, F, W} | publishers
        yield f"{api}.STREAM.MSG.GET.OBJ_{bucket}", {A, W} | publishers
        yield f"{api}.DIRECT.GET.OBJ_{bucket}", {W} | publishers
        yield f"{api}.STREAM.DELETE.OBJ_{bucket}", {A}
        yield f"{api}.STREAM.UPDATE.OBJ_{bucket}", {A}
        yield f"{api}.STREAM.MSG.DELETE.OBJ_{bucket}", set()
        yield f"{api}.CONSUMER.CREATE.OBJ_{bucket}.spy", {A}
    yield f"{api}.META.LEADER.STEPDOWN", set()
    yield f"{api}.ACCOUNT.PURGE.{FLEET}", set()
    yield "$SYS.REQ.SERVER.PING", set()
    yield "_INBOX_trainer.bob.x", set()


@pytest.mark.proves("P25")
async def test_only_permitted_roles_can_access_streams_and_buckets(tmp_path: Path) -> None:
    """Only permitted roles can read, delete or purge the requests of others, or change the desired state."""
    stream = stream_name(Subjects(FLEET), MODEL, "normal")
    async with guarded(tmp_path) as guard:
        for role, name in USERS.items():
            found = {where: await may(guard, name, "publish", where) for where, _ in operations(stream)}
            assert found == {where: role in roles for where, roles in operations(stream)}


@pytest.mark.proves("P25")
async def test_a_trainer_receives_no_results_of_another_trainer(tmp_path: Path) -> None:
    """While a worker answers bob, alice receives only presence, even if she subscribes to all other subjects."""
    received: list[str] = []

    async def record_message(message: Msg) -> None:
        received.append(message.subject)

    async with guarded(tmp_path) as guard, guard.worker("w0"), guard.connected("alice") as alice:
        for where in (*NEVER, "rb.v1.F.frame.bob.*", "rb.v1.F.frame.*.w0", "rb.v1.F.link.>", "rb.v1.F.presence.*"):
            await subscribe(alice, where, record_message)
        async with rollbus.connect(guard.login("bob")) as bob:
            await bob.fleet.wait_for_workers()
            assert (await bob.complete(greedy())).error is None
        await alice.confirm(timeout_s=SOON_S)

    assert set(received) == {"rb.v1.F.presence.w0"}


async def test_a_user_sees_no_stream_of_another_fleet(tmp_path: Path) -> None:
    """A user of one fleet sees no stream of another fleet, because each fleet is a NATS account of its own."""
    entries = ensure_users(tmp_path, [("one", A, "a"), ("two", A, "b")])
    one, two = (load_credentials(entry.path) for entry in entries)
    async with EmbeddedServer(users=[entry.user for entry in entries]) as server:
        await provision(Server(server.url, one), "one", [MODEL])
        nats = await open_connection(Server(server.url, two), name="b")
        info = await ask(nats, "INFO")
        await nats.shut()

    assert info["streams"] == 0


async def test_a_connection_without_credentials_fails_and_the_error_names_the_option(tmp_path: Path) -> None:
    """A connection without credentials fails, and the error names the option `--creds`."""
    async with guarded(tmp_path) as guard:
        with pytest.raises(BusBroken, match=r"Authorization Violation.*--creds FILE"):
            await open_connection(guard.url, name="nobody")


async def test_a_worker_drops_a_command_that_jetstream_delivers(tmp_path: Path) -> None:
    """A worker drops a command that JetStream delivers on an admin's control subject.

    A trainer had stored that command in the queue as its request.
    """
    subjects = Subjects(FLEET)
    received: list[str] = []
    arrived = asyncio.Event()

    async def record_message(_message: Msg) -> None:
        received.append("by the software")

    async def set_arrived(_message: Msg) -> None:
        arrived.set()

    async with (
        guarded(tmp_path) as guard,
        guard.connected("alice") as trainer,
        guard.connected("w1") as worker,
        guard.connected("w0") as victim,
    ):
        await subscribe(victim, subjects.controls, record_message)
        await subscribe(victim, subjects.controls, lambda message: received.append(message.subject))
        await victim.subscribe(subjects.controls, cb=set_arrived)
        await check_permitted(victim)
        await trainer.request(
            subjects.request("alice", MODEL, "normal"), b'{"command": "drain", "id": "1"}', timeout=SOON_S
        )
        pull = f"$JS.API.CONSUMER.MSG.NEXT.{stream_name(subjects, MODEL, 'normal')}.normal"
        await worker.publish(pull, b'{"batch": 1, "no_wait": true}', reply=subjects.control("boss"))
        async with asyncio.timeout(SOON_S):
            await arrived.wait()
        await victim.confirm(timeout_s=SOON_S)

        assert received == []
        assert victim.counters().streamed_msgs == 2


# A trainer reads only its own requests, a viewer only sums of experts, and nobody more by hand-made messages.


SUBJECTS = Subjects(FLEET)


def ids(found: rollbus.RequestList) -> list[str]:
    """Return the ids of the listed requests."""
    return [each.request_id for each in found.timelines]


async def test_each_role_reads_its_own_requests(tmp_path: Path) -> None:
    """Trainers and publishers see only their own requests, frontends and admins all, and viewers only experts."""
    async with guarded(tmp_path) as guard:
        found = {}
        async with guard.worker("w0"), rollbus.connect(guard.login("alice")) as alice:
            await alice.fleet.wait_for_workers()
            await alice.complete(greedy(request_id="secret"))
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

    async with (
        guarded(tmp_path) as guard,
        guard.worker("w0") as (asked, _),
        rollbus.connect(guard.login("alice")) as alice,
        guard.connected("bob") as bob,
        guard.connected("eye") as eye,
    ):
        await alice.fleet.wait_for_workers()
        await alice.complete(greedy(request_id="secret"))
        for nats, name in ((bob, "bob"), (eye, "eye")):
            await subscribe(nats, SUBJECTS.acks_to(name), receive)
            for read in (ReadRequest(show="slowest", client="alice"), ReadRequest(request_id="secret")):
                await publish(nats, SUBJECTS.read(name, "w0"), encode_json(read))
        await until_true(lambda: len(acks) == 4)
        assert [(ack["status"], ack["timelines"]) for ack in acks] == [("applied", [])] * 4

        rejected = asked.stats().bad_messages
        for data in (encode_json(Pause(id="p")), b"\xc1", b" " * 5000, b'{"command":"read_request","id":"1"}'):
            await publish(bob, SUBJECTS.read("bob", "w0"), data)
        await until_true(lambda: asked.stats().bad_messages == rejected + 4)
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
