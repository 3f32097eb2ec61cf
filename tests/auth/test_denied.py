"""An operation without permission fails immediately with `PermissionDenied`, which names the user and the subject."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.auth.credentials import Credentials, Role, User, new_seed
from rollbus.bus.auth.permissions import permissions
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import Connection, open_connection, publish, subscribe
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.jetstream import ask, put
from rollbus.bus.nats.server import Server
from rollbus.bus.objects.catalog import ensure_bucket
from rollbus.bus.queue.streams import ensure_queue, stream_name
from rollbus.bus.subjects import LANES, Subjects, published_bucket
from rollbus.schemas.acks import Ack
from rollbus.schemas.errors import BusBroken, InvalidRequest, PermissionDenied, RemoteProtocolError, RequestError
from rollbus.schemas.messages import (
    decode_ack,
)
from rollbus.schemas.request import GenerateRequest, Lane
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.auth.support import FLEET, MODEL, PUBLISHED, Guarded, guarded
from tests.cli.support import run_rollbus
from tests.control.support import ask as greedy
from tests.golden.vectors import DECODERS
from tests.support.waits import SOON_S

pytestmark = pytest.mark.slow


@pytest.mark.proves("P25")
async def test_a_trainer_cannot_command(tmp_path: Path) -> None:
    """A trainer can neither record a command nor publish one. The worker and the trainer's own requests continue."""
    async with guarded(tmp_path) as guard, guard.worker("w0"), rollbus.connect(guard.login("alice")) as rb:
        await rb.fleet.wait_for_workers()
        with pytest.raises(rollbus.PermissionDenied) as recorded:
            await rb.fleet.pause()
        stream = rb.generate(greedy(max_tokens=1000))
        await anext(stream)
        with pytest.raises(rollbus.PermissionDenied) as said:
            await rb.fleet.abort(["r"])
        await anext(stream)
        await stream.aclose()
        state = await rb.fleet.state()
        status = await run_rollbus(guard.url, FLEET, "resume", "--creds", str(guard.path("bob")))

    assert str(recorded.value) == "user alice (role trainer) may not record commands; roles that may: frontend, admin"
    assert (said.value.action, said.value.subject) == ("publish", "rb.v1.F.control.alice")
    assert state.desired == {}
    assert (status.code, status.stderr.strip()) == (
        1,
        "rollbus: user bob (role trainer) may not record commands; roles that may: frontend, admin",
    )


@pytest.mark.proves("P25")
async def test_a_worker_cannot_command(tmp_path: Path) -> None:
    """With a worker's key, a client can neither publish commands nor record them."""
    async with guarded(tmp_path) as guard:
        # The worker's key under a client's role, as a thief of the credentials file would try.
        own = guard.credentials("w0")
        stolen = Credentials(fleet=FLEET, role=Role.ADMIN, name="w0", seed=own.seed)
        with pytest.raises(PermissionDenied, match=r"user w0 \(role admin\) may not exchange results"):
            async with rollbus.connect(Server(guard.url, stolen)):
                pass


async def test_the_error_of_a_worker_without_a_queue_names_make_queue(tmp_path: Path) -> None:
    """A worker may not create streams.

    Its error names `rollbus make-queue`, and the worker serves as soon as an admin has created the queue.
    """
    async with guarded(tmp_path, models=()) as guard:
        async with guard.connected("w0") as nats:
            with pytest.raises(BusBroken, match=r"user w0 \(role worker\) may not create queues.*rollbus make-queue m"):
                await ensure_queue(nats, Subjects(FLEET), MODEL)
        async with guard.worker("w0"), rollbus.connect(guard.login("alice")) as rb:
            ended = await run_rollbus(guard.url, FLEET, "make-queue", MODEL, "--creds", str(guard.path("boss")))
            await rb.fleet.wait_for_workers()
            assert (await rb.complete(greedy())).error is None
        denied = await run_rollbus(guard.url, FLEET, "make-queue", "other", "--creds", str(guard.path("front")))

    assert (ended.code, ended.stderr) == (0, "")
    assert denied.code == 1
    assert "user front (role frontend) may not create queues and buckets; roles that may: admin" in denied.stderr


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("alice", {"client": "bob"}, "client is 'bob'; allowed: alice, as in the credentials"),
        ("alice", {"fleet": "G"}, "fleet is 'G'; allowed: F, as in the credentials"),
        ("w0", {}, "credentials belong to the worker w0 of fleet F; allowed: those of a client"),
    ],
)
async def test_the_client_refuses_names_that_differ_from_its_credentials(
    name: str, fields: dict[str, str], problem: str, tmp_path: Path
) -> None:
    """The client rejects names that differ from its credentials before it connects.

    The server would deny each operation with them.
    """
    async with guarded(tmp_path) as guard:
        with pytest.raises(InvalidRequest) as caught:
            rollbus.connect(guard.url, credentials=guard.path(name), **fields)  # type: ignore[arg-type]

    assert problem in str(caught.value)


def test_a_worker_configuration_refuses_the_credentials_of_another_user() -> None:
    """A worker's configuration rejects the credentials of another worker and of a client."""
    own = Credentials(fleet=FLEET, role=Role.WORKER, name="w0", seed=new_seed())
    client = Credentials(fleet=FLEET, role=Role.TRAINER, name="w0", seed=new_seed())
    for credentials, worker_id in ((own, "w1"), (client, "w0")):
        with pytest.raises(InvalidRequest, match="credentials"):
            WorkerConfig(nats_url="", model=MODEL, fleet=FLEET, worker_id=worker_id, credentials=credentials)


async def test_a_worker_with_the_key_of_a_trainer_ends_with_permission_denied(tmp_path: Path) -> None:
    """A worker with the key of a trainer ends with `PermissionDenied` and does not wait for a lease."""
    async with guarded(tmp_path) as guard:
        forged = Credentials(fleet=FLEET, role=Role.WORKER, name="w9", seed=guard.credentials("alice").seed)
        config = WorkerConfig(nats_url=guard.url, model=MODEL, fleet=FLEET, worker_id="w9", credentials=forged)
        with pytest.raises(PermissionDenied, match=r"user w9 \(role worker\) may not"):
            await Worker(config, SyntheticEngine()).run()


async def test_the_server_refuses_an_unknown_key(tmp_path: Path) -> None:
    """The server rejects an unknown key, for example after `rollbus auth remove`.

    Neither the error nor a representation contains the secret.
    """
    stranger = Credentials(fleet=FLEET, role=Role.ADMIN, name="boss", seed=new_seed())
    async with guarded(tmp_path) as guard:
        with pytest.raises(BusBroken, match="Authorization Violation") as caught:
            await open_connection(Server(guard.url, stranger), name="stranger")

    for shown in (str(caught.value), repr(caught.value), repr(stranger), repr(Server("nats://u:pw@h", stranger))):
        assert stranger.seed not in shown
        assert "pw" not in shown


async def test_no_log_contains_a_seed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No log contains a seed, even at the level DEBUG."""
    caplog.set_level(logging.DEBUG)
    async with guarded(tmp_path) as guard:
        async with rollbus.connect(guard.login("alice")) as rb:
            with pytest.raises(RequestError):
                await rb.complete(GenerateRequest(prompt_token_ids=[1]))
        seeds = [guard.credentials(name).seed for name in ("alice", "boss", "w0")]
        log = caplog.text + guard.server.log_tail()

    assert [seed for seed in seeds if seed in log] == []


async def test_a_server_without_users_accepts_a_client_with_credentials(tmp_path: Path) -> None:
    """On a server without users, a client with credentials can connect, and takes its name from them."""
    credentials = Credentials(fleet=FLEET, role=Role.ADMIN, name="boss", seed=new_seed())
    async with EmbeddedServer() as server:
        await provision(Server(server.url, credentials), FLEET, [MODEL])
        async with rollbus.connect(server.url, credentials=credentials) as rb:
            assert (await rb.fleet.state()).workers == ()
            assert "boss" in repr(rb)


async def test_a_worker_may_not_record_a_command(tmp_path: Path) -> None:
    """A worker may not record a command, so a command that was published without a record fails immediately."""
    subjects = Subjects(FLEET)
    acks: asyncio.Queue[Ack] = asyncio.Queue()

    async def record_ack(message: Msg) -> None:
        acks.put_nowait(decode_ack(message.data))

    async with (
        guarded(tmp_path) as guard,
        guard.worker("w0"),
        rollbus.connect(guard.login("alice")) as rb,
        guard.connected("boss") as nats,
    ):
        await rb.fleet.wait_for_workers()
        await subscribe(nats, subjects.acks_to("boss"), record_ack)
        where, command = subjects.control("boss"), b'{"command": "pause", "id": "1", "timeout_s": 60}'
        await nats.publish(where, command, headers=nats.signatures.headers(where, command))
        answers = [await acks.get(), await acks.get()]
        state = await rb.fleet.state()

    assert [ack.status for ack in answers] == ["accepted", "failed"]
    assert "user w0 (role worker) may not record commands; roles that may: frontend, admin" in answers[1].error.message
    assert state.desired == {}


# NATS checks no permission on the reply subject of a message, so each role publishes with each valuable reply
# subject.


SUBJECTS = Subjects(FLEET)
QUEUE = stream_name(SUBJECTS, MODEL, "normal")
ATTACKERS = {
    Role.TRAINER: "alice",
    Role.PUBLISHER: "dave",
    Role.WORKER: "w0",
    Role.VIEWER: "eye",
    Role.FRONTEND: "front",
}
"""The attackers. An admin is not among them, because it may change everything anyway."""
BUCKET = f"rollbus-{FLEET}"
CAROLS, DAVES = (published_bucket(FLEET, model) for model in (MODEL, "forged"))
STREAMS = (QUEUE, stream_name(SUBJECTS, MODEL, "resume"), "KV_rollbus", f"OBJ_{BUCKET}", f"OBJ_{CAROLS}")
STATE = f"$KV.rollbus.{FLEET}.{MODEL}"

STORED = (
    STATE,
    f"$O.{CAROLS}.M.x",
    f"$O.{CAROLS}.C.x",
    f"$O.{BUCKET}.M.x",
    f"$O.{BUCKET}.C.x",
    f"rb.v1.{FLEET}.req.bob.{MODEL}.normal",
)
"""Subjects of streams, where an answer would be stored in another user's name."""
VERBS = (
    *(f"$JS.API.STREAM.{verb}.{stream}" for verb in ("DELETE", "PURGE", "UPDATE", "MSG.DELETE") for stream in STREAMS),
    *(f"$JS.API.CONSUMER.DELETE.{QUEUE}.{lane}" for lane in ("high", "normal", "low")),
    f"$JS.API.CONSUMER.PAUSE.{QUEUE}.normal",
    f"$JS.API.CONSUMER.CREATE.{QUEUE}.spy",
    f"$JS.API.CONSUMER.MSG.NEXT.{QUEUE}.normal",
)
"""Subjects of JetStream's services, where an answer would be a call in JetStream's name."""
CLIENTS = ("frame.bob.w1", "plain.bob.x", "presence.w1", "ack.boss.w1", "ack.bob.w1", "client.bob", "ping", "ping.bob")
WORKERS = ("control.boss", "client.bob", "link.bob.w1", "direct.bob.w1", "ping", "ping.bob")
REPLIES = (
    *STORED,
    *VERBS,
    *(f"rb.v1.{FLEET}.{kind}" for kind in dict.fromkeys(CLIENTS + WORKERS)),
    "_INBOX_admin.boss.x",
    "_INBOX_trainer.bob.x",
    "$SYS.REQ.SERVER.PING",
)


def concrete(pattern: str) -> list[str]:
    """Return subjects that match a permitted pattern, with the names that an attacker would use for its wildcards."""
    if ".API.CONSUMER.INFO." in pattern:
        return [f"$JS.API.CONSUMER.INFO.{QUEUE}.normal"]
    if ".MSG.NEXT." in pattern or pattern.startswith("$JS.ACK."):
        lane = pattern.removesuffix(".>").rpartition(".")[2]
        stream = stream_name(SUBJECTS, MODEL, cast(Lane, lane))
        if ".MSG.NEXT." in pattern:
            return [f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{lane}"]
        return [f"$JS.ACK.{stream}.{lane}.1.1.1.1.0"]
    if pattern.startswith("$KV."):
        return [f"$KV.rollbus.{FLEET}.forged"]  # a model of its own, which the attacker may write anyway
    if ".req." in pattern:
        return [pattern.replace("*.*", f"{MODEL}.{lane}") for lane in ("normal", "resume")]
    return [pattern.replace("*", "bob" if ".frame." in pattern or ".ack." in pattern else "w1").replace(">", "x")]


def payloads(subject: str) -> list[bytes]:
    """Return payloads to which the service of this subject answers, and invalid ones."""
    if ".MSG.NEXT." in subject:
        return [b'{"batch":1,"no_wait":true}', b'{"batch":3,"expires":1000000000,"idle_heartbeat":100000000}']
    if ".STREAM.MSG.GET.KV" in subject or ".MSG.GET.OBJ" in subject:
        return [json.dumps({"last_by_subj": STATE}).encode(), b'{"seq":1}']
    if ".DIRECT.GET." in subject:
        return [b'{"seq":1}', b'{"seq":1,"batch":5,"next_by_subj":">"}']
    if subject.startswith("$JS.ACK."):
        return [b"+ACK", b"+NXT"]
    return [b"", b"{}"]


async def contents(admin: Connection) -> dict[str, Any]:
    """Return the streams' contents, configurations and consumers, except what the attacker may write."""
    found: dict[str, Any] = {}
    for stream in STREAMS:
        info = await ask(admin, f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
        of_others = {
            subject: count
            for subject, count in (info["state"].get("subjects") or {}).items()
            if not any(f".req.{name}." in subject for name in ATTACKERS.values()) and not subject.endswith(".forged")
        }
        found[stream] = (info["config"], of_others, info["state"].get("consumer_count"))
    for lane in LANES:
        stream = stream_name(SUBJECTS, MODEL, lane)
        found[lane] = (await ask(admin, f"CONSUMER.INFO.{stream}.{lane}"))["config"]
    found["state"] = (await ask(admin, "STREAM.MSG.GET.KV_rollbus", {"last_by_subj": STATE}))["message"]["data"]
    return found


def is_meant(message: Msg) -> bool:
    """Return True if a worker would act on a message, because it can decode it."""
    try:
        DECODERS[message.subject.split(".")[3]](message.data)
    except (RemoteProtocolError, InvalidRequest):
        return False
    return True


@asynccontextmanager
async def victims(guard: Guarded, heard: list[tuple[str, str]]) -> AsyncIterator[None]:
    """Subscribe like the software as bob, boss and w1, and record receiver and subject of each message."""

    async def listen(name: str, subjects: list[str], nats: Connection) -> None:
        async def on_message(message: Msg) -> None:
            if name != "w1" or is_meant(message):
                heard.append((name, message.subject))

        for subject in subjects:
            await subscribe(nats, subject, on_message)

    prefix = f"rb.v1.{FLEET}"
    async with guard.connected("bob") as bob, guard.connected("boss") as boss, guard.connected("w1") as worker:
        of_bob = ("frame.bob.*", "plain.bob.>", "ack.bob.*", "client.bob")
        await listen("bob", [*(f"{prefix}.{kind}" for kind in of_bob), "_INBOX_trainer.bob.>"], bob)
        await listen("boss", [f"{prefix}.ack.boss.*", f"{prefix}.frame.boss.*", "_INBOX_admin.boss.x"], boss)
        of_worker = ("control.*", "client.*", "link.*.w1", "direct.*.w1")
        await listen("w1", [f"{prefix}.{kind}" for kind in of_worker], worker)
        for nats in (bob, boss, worker):
            await nats.confirm(timeout_s=SOON_S)
        yield
        for nats in (bob, boss, worker):
            await nats.confirm(timeout_s=SOON_S)


@pytest.mark.parametrize("role", list(ATTACKERS))
async def test_no_reply_subject_reaches_a_subject_that_the_user_may_not_publish(role: Role, tmp_path: Path) -> None:
    """No permitted subject and reply subject of a role changes streams, others' requests or desired states."""
    name = ATTACKERS[role]
    own = permissions(User(fleet=FLEET, role=role, name=name, public_key="U", models=PUBLISHED.get(name, ())))
    heard: list[tuple[str, str]] = []
    async with guarded(tmp_path) as guard, guard.connected("boss") as admin, guard.connected("bob") as bob:
        for bucket in (BUCKET, DAVES):
            await ensure_bucket(admin, bucket, max_bytes=1024**2)
        await put(admin, STATE, b"{}")
        await put(admin, f"$O.{BUCKET}.C.content", b"content")
        await put(admin, f"$O.{CAROLS}.C.content", b"content")
        await put(bob, f"rb.v1.{FLEET}.req.bob.{MODEL}.normal", b"a request")
        before = await contents(admin)
        async with victims(guard, heard), guard.connected(name) as attacker:
            for pattern in own.publish:
                for subject in concrete(pattern):
                    for data in payloads(subject):
                        for reply in REPLIES:
                            await publish(attacker, subject, data, reply=reply)
                await attacker.confirm(timeout_s=SOON_S)
            await asyncio.sleep(1.2)  # pull requests and heartbeats have ended
        after = await contents(admin)

    if role is Role.WORKER:
        # A worker may pull any request and ack it.
        for found in (before, after):
            for stream in STREAMS[:2]:
                found[stream] = (found[stream][0], found[stream][2])
    assert after == before
    assert [one for one in heard if one not in allowed(role, name)] == []


def allowed(role: Role, name: str) -> set[tuple[str, str]]:
    """Return the messages that other users receive because this user may publish them."""
    prefix = f"rb.v1.{FLEET}"
    if role is Role.WORKER:
        return {
            ("bob", f"{prefix}.frame.bob.{name}"),
            ("bob", f"{prefix}.plain.bob.x"),
            ("bob", f"{prefix}.ack.bob.{name}"),
        }
    return set()


@pytest.mark.parametrize("role", list(ATTACKERS))
async def test_a_worker_answers_all_requests_while_an_attacker_sends_reply_subjects(role: Role, tmp_path: Path) -> None:
    """While an attacker publishes with all reply subjects, a worker answers all requests of bob."""
    name = ATTACKERS[role]
    own = permissions(User(fleet=FLEET, role=role, name=name, public_key="U", models=PUBLISHED.get(name, ())))
    async with (
        guarded(tmp_path) as guard,
        guard.worker("w1"),
        rollbus.connect(guard.login("bob")) as bob,
        guard.connected(name) as attacker,
    ):
        await bob.fleet.wait_for_workers()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(bob.complete(greedy())) for _ in range(50)]
            for pattern in own.publish:
                if role is Role.WORKER and (".MSG.NEXT." in pattern or pattern.startswith("$JS.ACK.")):
                    continue  # a worker may pull requests and never answer them
                for subject in concrete(pattern):
                    for reply in REPLIES:
                        await publish(attacker, subject, payloads(subject)[0], reply=reply)
        assert [one.result().error for one in asked] == [None] * 50
