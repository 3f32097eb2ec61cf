"""An operation without permission fails immediately with `PermissionDenied`, which names the user and the subject."""

import asyncio
import logging
from pathlib import Path

import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.auth.credentials import Credentials, Role, new_seed
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import open_connection, subscribe
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.server import Server
from rollbus.bus.queue.streams import ensure_queue
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack
from rollbus.schemas.errors import BusBroken, InvalidRequest, PermissionDenied, RequestError
from rollbus.schemas.messages import decode_ack
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.auth.support import FLEET, MODEL, guarded
from tests.cli.support import run_rollbus
from tests.control.support import ask
from tests.support.fleet import synthetic_worker

pytestmark = pytest.mark.slow


@pytest.mark.proves("P25")
async def test_a_trainer_cannot_command(tmp_path: Path) -> None:
    """A trainer can neither record a command nor publish one. The worker and the trainer's own requests continue."""
    async with guarded(tmp_path) as guard:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with worker, rollbus.connect(guard.login("alice")) as rb:
            await rb.fleet.wait_for_workers()
            with pytest.raises(rollbus.PermissionDenied) as recorded:
                await rb.fleet.pause()
            stream = rb.generate(ask(max_tokens=1000))
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
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with worker, rollbus.connect(guard.login("alice")) as rb:
            ended = await run_rollbus(guard.url, FLEET, "make-queue", MODEL, "--creds", str(guard.path("boss")))
            await rb.fleet.wait_for_workers()
            assert (await rb.complete(ask())).error is None
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

    async with guarded(tmp_path) as guard:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with worker, rollbus.connect(guard.login("alice")) as rb, guard.connected("boss") as nats:
            await rb.fleet.wait_for_workers()
            await subscribe(nats, subjects.acks_to("boss"), record_ack)
            where, command = subjects.control("boss"), b'{"command": "pause", "id": "1", "timeout_s": 60}'
            await nats.publish(where, command, headers=nats.signatures.headers(where, command))
            answers = [await acks.get(), await acks.get()]
            state = await rb.fleet.state()

    assert [ack.status for ack in answers] == ["accepted", "failed"]
    assert "user w0 (role worker) may not record commands; roles that may: frontend, admin" in answers[1].error.message
    assert state.desired == {}
