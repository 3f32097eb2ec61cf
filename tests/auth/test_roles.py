"""Each role can do all its operations, and the server's log contains no denied operation."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.auth import permissions
from rollbus.bus.auth.credentials import Role
from rollbus.bus.client.client import watch_fleet
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import publish, publish_permitted, subscribe
from rollbus.bus.nats.jetstream import put
from rollbus.bus.nats.server import CREDENTIALS_VARIABLE
from rollbus.bus.objects.catalog import list_objects, set_bucket_bytes
from rollbus.bus.objects.uploads import Uploads
from rollbus.bus.protocol.weights.chain import SPARE_BYTES
from rollbus.bus.queue.publisher import QueueProbes
from rollbus.bus.queue.streams import set_limits
from rollbus.bus.subjects import Subjects, published_bucket
from rollbus.frontend.cli.local.http import bind_address, serve_http, settings_from_environment
from rollbus.schemas.control import DesiredState, Pause, Recorded, Resume, UpdateWeights
from rollbus.schemas.errors import ControlCode, ControlError, InvalidRequest, PermissionDenied
from rollbus.schemas.messages import RequestMessage, encode, encode_json
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.schemas.weights import WeightSource
from rollbus.workers.control import content
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.lifecycle import HEARTBEAT_S
from tests.auth.support import FLEET, MODEL, guarded
from tests.cli.support import run_rollbus
from tests.control.support import ask, folders
from tests.support.checkpoints import write_checkpoint
from tests.support.fleet import until_worker
from tests.support.objects import stored_messages
from tests.support.processes import worker_process
from tests.support.requests import greedy
from tests.support.waits import until_true

pytestmark = pytest.mark.slow


async def test_all_requests_of_a_trainer_finish(tmp_path: Path) -> None:
    """A trainer's requests finish through the queue, in a session, as a closed stream, and when a worker stops."""
    slow = SyntheticConfig(step_s=0.01)
    async with guarded(tmp_path) as guard, guard.worker("w0", config=slow):
        async with rollbus.connect(guard.url, credentials=guard.path("alice")) as rb:
            await rb.fleet.wait_for_workers()
            assert (await rb.complete(ask())).error is None
            for _ in range(2):
                assert (await rb.complete(ask(session_id="s"))).worker_ids == ("w0",)
            async for _ in rb.generate(ask(max_tokens=1000)):
                break
            async with guard.worker("w1", config=slow) as (worker, _):
                await rb.fleet.wait_for_workers(2)
                generations = []
                async for generation in rb.complete_many([ask(max_tokens=60) for _ in range(8)]):
                    worker.stop()
                    generations.append(generation)
            assert [generation.error for generation in generations] == [None] * 8
            state = await rb.fleet.state()

        assert state.queues
        assert guard.violations() == []


async def test_an_admin_can_send_commands_and_upload_weights(tmp_path: Path) -> None:
    """An admin can pause, resume, update weights by path and upload, check weights and reset, with `--creds`."""
    one, two = folders(tmp_path / "weights")
    async with guarded(tmp_path / "auth") as guard:
        options = ("--model", str(one), "--engine", "synthetic", "--served-model-name", MODEL, "--weight-version", "1")
        own = (
            "--weight-root",
            str(one.parent),
            "--cache-dir",
            str(tmp_path / "cache"),
            "--creds",
            str(guard.path("w0")),
        )
        async with worker_process(guard.url, FLEET, *options, *own) as process:
            async with rollbus.connect(guard.login("boss")) as rb:
                await rb.fleet.wait_for_workers()
                assert (await rb.fleet.pause()).is_complete
                await until_worker(rb, "w0", WorkerState.PAUSED)
                assert (await rb.fleet.resume()).is_complete
                assert (await rb.fleet.update_weights(two, version=2)).is_complete
                assert (await rb.fleet.update_weights(one, version=3, upload=True)).is_complete
                assert (await rb.fleet.update_weights(two, version=4, upload=True)).is_complete
                assert (await rb.fleet.check_weights(one)).is_complete
                assert await rb.fleet.reset() == (MODEL,)
            creds = ("--creds", str(guard.path("boss")))
            ended = await run_rollbus(guard.url, FLEET, "pause", "--json", *creds)
            process.terminate()
            assert await process.wait() == 0

        assert (ended.code, json.loads(ended.stdout)["complete"]) == (0, True)
        assert guard.violations() == []


async def test_an_upload_of_a_publisher_leaves_room_for_the_chain_record(tmp_path: Path) -> None:
    """An upload that would fill the publishers' bucket is rejected before its first byte."""
    one, _ = folders(tmp_path / "weights")
    bucket = published_bucket(FLEET, MODEL)
    async with guarded(tmp_path / "auth") as guard, guard.connected("boss") as nats:
        await set_bucket_bytes(nats, bucket, SPARE_BYTES)
        uploads = Uploads(guard.login("carol"), Subjects(FLEET))
        command = UpdateWeights(model=MODEL, version=1, source=WeightSource(path=str(one)))
        with pytest.raises(ControlError, match="an admin can enlarge it: rollbus make-queue") as raised:
            await uploads.put(MODEL, command, one)
        assert raised.value.code is ControlCode.STORAGE
        assert await stored_messages(nats, bucket) == 0
        await set_bucket_bytes(nats, bucket, 2 * SPARE_BYTES)
        await uploads.put(MODEL, command, one)


async def test_a_publisher_can_update_the_weights_of_its_models(tmp_path: Path) -> None:
    """A publisher can generate and update weights by path and by upload.

    An admin's pause remains in force during its updates.
    """
    one, two = folders(tmp_path / "weights")
    own: dict[str, Any] = {"model_path": str(one), "weight_roots": (str(one.parent),), "weight_version": 1}
    own["cache_dir"] = str(tmp_path / "cache")
    async with guarded(tmp_path / "auth") as guard, guard.connected("boss") as nats, guard.worker("w0", **own):
        async with rollbus.connect(guard.login("carol")) as carol, rollbus.connect(guard.login("boss")) as boss:
            await carol.fleet.wait_for_workers()
            await boss.fleet.wait_for_workers()
            assert (await carol.complete(ask())).error is None
            assert (await carol.fleet.update_weights(two, version=1, upload=True, allow_rollback=True)).is_complete
            for version in (2, 3):
                assert (await carol.fleet.update_weights(one, version=version, upload=True)).is_complete
            assert len(await list_objects(nats, published_bucket(FLEET, MODEL))) == 2 * len(list(one.iterdir()))
            assert (await carol.fleet.update_weights(two, version=4)).is_complete
            assert (await boss.fleet.pause()).is_complete
            for version in range(5, 8):
                assert (await carol.fleet.update_weights(one, version=version)).is_complete
            # A worker that starts now reads the pause of the admin and the weights of the publisher.
            async with guard.worker("w1", **own):
                await until_worker(boss, "w1", lambda it: (it.state, it.weight_version) == (WorkerState.PAUSED, 7))
            state = (await boss.fleet.state()).desired[MODEL]
            assert (await boss.fleet.resume(workers=["w0"])).is_complete
            assert (await carol.complete(ask())).error is None

        assert (state.registers["pause"].command.command, state.epoch) == ("pause", 8)
        assert guard.violations() == []


async def test_a_worker_ignores_an_unsigned_state_until_an_admin_signs_the_state(tmp_path: Path) -> None:
    """A worker ignores an unsigned state until an admin signs it with `rollbus sign`."""
    async with guarded(tmp_path) as guard, guard.connected("boss") as nats:
        pause = Pause(id="p", epoch=1, model=MODEL)
        state = DesiredState(model=MODEL, epoch=1, registers={"pause": Recorded(epoch=1, command=pause)})
        await put(nats, f"$KV.rollbus.{FLEET}.{MODEL}", encode_json(state))
        async with guard.worker("w0"), rollbus.connect(guard.login("eye")) as rb:
            await until_worker(rb, "w0", WorkerState.SERVING)
            refused = await run_rollbus(guard.url, FLEET, "sign", "--creds", str(guard.path("carol")))
            ended = await run_rollbus(guard.url, FLEET, "sign", "--json", "--creds", str(guard.path("boss")))
            await until_worker(rb, "w0", WorkerState.PAUSED)

        assert (refused.code, "use the credentials of an admin" in refused.stderr) == (1, True)
        assert (ended.code, json.loads(ended.stdout)) == (0, {"signed": {MODEL: 1}, "objects": []})


async def test_a_viewer_runs_status(tmp_path: Path) -> None:
    """With a viewer's credentials, `rollbus status` shows workers, queues and desired states of its fleet."""
    async with guarded(tmp_path) as guard, guard.worker("w0"):
        async with rollbus.connect(guard.login("boss")) as rb:
            await rb.fleet.wait_for_workers()
            await rb.fleet.pause()
        ended = await run_rollbus(guard.url, FLEET, "status", "--json", "--creds", str(guard.path("eye")))

        assert (ended.code, ended.stderr) == (0, "")
        told = json.loads(ended.stdout)
        assert [worker["state"] for worker in told["workers"]] == ["paused"]
        assert told["queues"]
        assert MODEL in told["desired"]
        assert guard.violations() == []


async def test_a_frontend_serves_http(tmp_path: Path) -> None:
    """A frontend serves HTTP requests for tokens and for commands under its own name."""
    async with guarded(tmp_path) as guard, guard.worker("w0"):
        with contextlib.closing(bind_address("127.0.0.1", 0)) as listening:
            serve = serve_http(guard.login("front"), FLEET, settings_from_environment(), listening)
            async with serve as url, httpx.AsyncClient(base_url=url) as client:
                while not (await client.get("/v1/models")).json()["data"]:
                    pass
                body = {"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}
                answer = await client.post("/inference/v1/generate", json=body)
                paused = await client.post("/v1/rl/pause")
                resumed = await client.post("/v1/rl/resume")

        assert (answer.status_code, paused.status_code, resumed.status_code) == (200, 200, 200)
        assert len(answer.json()["choices"][0]["token_ids"]) == 4
        assert guard.violations() == []


async def test_a_viewer_claims_no_client_name(tmp_path: Path) -> None:
    """`rollbus status` with the credentials of a running trainer does not disturb the trainer's requests."""
    async with guarded(tmp_path) as guard, guard.worker("w0", config=SyntheticConfig(step_s=0.05)):
        async with rollbus.connect(guard.login("alice")) as rb:
            await rb.fleet.wait_for_workers()
            stream = rb.generate(ask(max_tokens=100))
            await anext(stream)
            ended = await run_rollbus(guard.url, FLEET, "status", "--json", "--creds", str(guard.path("alice")))
            chunks = [chunk async for chunk in stream]

        assert ended.code == 0
        assert len(json.loads(ended.stdout)["workers"]) == 1
        assert chunks[-1].error is None


async def test_the_environment_defines_fleet_client_name_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credentials file in $ROLLBUS_CREDS defines the fleet, the client's name and the key."""
    async with guarded(tmp_path) as guard, guard.worker("w0"):
        monkeypatch.setenv(CREDENTIALS_VARIABLE, str(guard.path("alice")))
        async with rollbus.connect(guard.url) as rb:
            await rb.fleet.wait_for_workers()
            request = GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=2))
            assert (await rb.complete(request)).error is None

        assert "alice" in repr(rb)
        assert guard.credentials("alice").role is Role.TRAINER


# Which roles may observe the commands of others, and that no other role can forge what they observe.


async def test_an_admin_and_a_frontend_observe_commands_of_each_other(tmp_path: Path) -> None:
    """An admin and a frontend observe each other's commands and acks, which other roles cannot forge.

    They can also list the clients of waiting requests.
    """
    async with (
        guarded(tmp_path) as guard,
        guard.worker("w0"),
        rollbus.connect(guard.login("front")) as rb,
        rollbus.connect(guard.login("boss")) as other,
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
        (own.id, "front", {"applied": 1}),
        (told.id, "boss", {"applied": 1}),
    ]


async def test_other_roles_may_not_observe_commands(tmp_path: Path) -> None:
    """For other roles, observing commands fails with `PermissionDenied`, and the client's requests continue."""
    async with guarded(tmp_path) as guard, guard.worker("w0"), rollbus.connect(guard.login("alice")) as rb:
        await rb.fleet.wait_for_workers()
        watch = watch_fleet(rb)
        with pytest.raises(PermissionDenied) as listened:
            await watch.listen()
        with pytest.raises(PermissionDenied) as listed:
            await watch.clients([MODEL])
        assert (await rb.complete(ask())).error is None
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


# The comparison of a worker's start checkpoint with other workers, with users.


@pytest.mark.parametrize("is_earlier", [False, True])
async def test_a_worker_compares_its_start_if_its_user_may_receive_presence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    """A worker whose user was created by an earlier release may not receive presence: it serves without comparison."""
    monkeypatch.setattr(content, "LISTEN_S", 1.25 * HEARTBEAT_S)
    if is_earlier:
        rules = (
            replace(rule, observe=frozenset()) if rule.subject == "presence.<worker>" else rule
            for rule in permissions.SUBJECT_RULES
        )
        monkeypatch.setattr(permissions, "SUBJECT_RULES", tuple(rules))
    folders = [str(write_checkpoint(tmp_path / str(fill), fill=fill)) for fill in (1, 2)]
    async with guarded(tmp_path / "users") as guard:

        def worker(number: int) -> contextlib.AbstractAsyncContextManager[object]:
            return guard.worker(f"w{number}", model_path=folders[number], cache_dir=str(tmp_path / "cache"))

        async with worker(0), rollbus.connect(guard.login("alice")) as rb:
            await rb.fleet.wait_for_workers()
            async with worker(1):
                expected = WorkerState.SERVING if is_earlier else WorkerState.OUTDATED
                second = await until_worker(rb, "w1", expected)

    assert (second.last_error is None) == is_earlier


# Probes of the queues on a server with users: admins may publish them, and nothing else to a queue.


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
    async with (
        guarded(tmp_path) as guard,
        guard.worker("w0") as (serving, _),
        rollbus.connect(guard.login("boss")) as rb,
    ):
        await rb.fleet.wait_for_workers()
        assert await rb.fleet.check_queues() == {}
        assert await rb.fleet.check_queues() == {}
        expected = 0 if is_earlier else 4
        await until_true(lambda: serving.stats().puller.probes == expected)

        assert serving.stats().intake.bad == 0
        assert len(guard.violations()) == is_earlier


async def test_an_admin_sends_no_requests_as_probes(tmp_path: Path) -> None:
    """Workers reject a request on the subject of probes, whatever client it names, and serve a trainer as before."""
    async with (
        guarded(tmp_path) as guard,
        guard.connected("boss") as boss,
        guard.worker("w0") as (serving, _),
        rollbus.connect(guard.login("alice")) as rb,
    ):
        await rb.fleet.wait_for_workers()
        request = msgspec.Raw(encode(greedy(1, 2)))
        for client in (b"boss", b"alice", b"~probe"):
            # Programs of an attacker check no names.
            data = encode(RequestMessage(client="x" * len(client), incarnation="i", request=request))
            await put(boss, SUBJECTS.probe(MODEL, "normal"), data.replace(b"x" * len(client), client))
        await until_true(lambda: serving.stats().intake.bad == 3)

        assert serving.stats().links.requests == 0
        assert (await rb.complete(greedy(1, 2))).error is None
        assert serving.stats().puller.probes == 0


# Known models on a server with users: who may read, make and forget them.


async def test_a_trainer_without_a_model_reads_the_known_models(tmp_path: Path) -> None:
    """A trainer that names no model gets the list of the models that an admin has made, and cannot forget one.

    The worker writes no state. Its server denies nothing, so nothing was tried.
    """
    async with (
        guarded(tmp_path) as guard,
        guard.worker("w0"),
        rollbus.connect(guard.login("alice")) as rb,
        rollbus.connect(guard.login("boss")) as admin,
    ):
        await rb.fleet.wait_for_workers()
        assert await rb.fleet.known_models() == (MODEL,)
        assert (await rb.complete(greedy(1, 2))).model == MODEL
        await provision(guard.login("boss"), FLEET, ["other"])
        assert (await rb.complete(greedy(1, 2))).model == MODEL
        async with rollbus.connect(guard.login("bob")) as late:
            with pytest.raises(InvalidRequest, match=f"one of {MODEL}, other"):
                await late.complete(greedy(1, 2))
            assert guard.violations() == []
            with pytest.raises(PermissionDenied):
                await late.fleet.forget_model("other")
            assert await admin.fleet.forget_model("other")
            assert (await late.complete(greedy(1, 2))).model == MODEL


async def test_a_model_that_was_forgotten_can_come_back(tmp_path: Path) -> None:
    """If a forgotten model is made again, programs that remember its signed states accept its new commands."""
    async with guarded(tmp_path) as guard, guard.connected("boss") as boss, guard.connected("front") as front:
        store, remembers = DesiredStore(boss, Subjects(FLEET)), DesiredStore(front, Subjects(FLEET))
        for number in range(5):
            await store.record(MODEL, Pause(id=f"p{number}"))
        before = await remembers.read(MODEL)
        await store.forget(MODEL)
        await provision(guard.login("boss"), FLEET, [MODEL])
        first = await remembers.read(MODEL)
        await store.record(MODEL, Pause(id="later"))
        after = await remembers.read(MODEL)

    assert (before.epoch >= 5, first.is_first, first.bucket != before.bucket) == (True, True, True)
    assert (after.epoch, after.registers["pause"].command.id, remembers.refused) == (first.epoch + 1, "later", 0)
