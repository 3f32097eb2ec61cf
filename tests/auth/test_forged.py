"""Workers and controllers accept only signed states and commands: forged, replayed and copied ones change nothing.

The attacker of these tests can write everything that a server can be made to store or deliver, like an attacker that
controls the server. It uses an admin's connection, and only those keys that a test names.
"""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.auth.credentials import SIGNED, Role, Signatures, load_credentials
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.control.revisions import BASE, BASE_SIGNED
from rollbus.bus.nats.connection import Connection, publish
from rollbus.bus.nats.jetstream import ask, headers_of, put
from rollbus.bus.objects.catalog import ensure_bucket
from rollbus.bus.objects.layout import info_subject
from rollbus.bus.objects.writer import put_folder, sign_folder
from rollbus.bus.protocol.fleet import authority, desired
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import (
    Abort,
    AnyCommand,
    DesiredState,
    Drain,
    Pause,
    Recorded,
    Restart,
    Resume,
    Sleep,
    StartWeightUpdate,
    UpdateWeights,
)
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.messages import decode_ack, decode_desired, encode_json
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.weights import WeightSource
from rollbus.workers.worker import Worker
from tests.auth.support import FLEET, MODEL, Guarded, guarded
from tests.control.support import ask as greedy
from tests.support.fleet import until_worker
from tests.support.objects import fetch_folder, files_in, write_folder
from tests.support.waits import SOON_S, until_true

pytestmark = pytest.mark.slow


SUBJECTS = Subjects(FLEET)
STATE = f"$KV.rollbus.{FLEET}.{MODEL}"
ON_THE_WAY = {WorkerState.STARTING, WorkerState.UPDATING}
"""States of a worker that has not compared itself with the desired state yet."""


@dataclass
class Attack:
    """A fleet of one worker that an admin has paused and resumed, and the connection of an attacker."""

    guard: Guarded
    rb: rollbus.Client
    """The client of the admin."""
    nats: Connection
    """The connection of the attacker."""
    worker: Worker
    folder: Path

    async def stored(self, number: int) -> tuple[bytes, dict[str, str]]:
        """Return a revision of the stored state with its signature; revision 1 is the oldest."""
        sequence = 1
        for _ in range(number):
            answer = await ask(self.nats, "STREAM.MSG.GET.KV_rollbus", {"seq": sequence, "next_by_subj": STATE})
            sequence = answer["message"]["seq"] + 1
        message = await self.nats.jetstream().get_msg("KV_rollbus", seq=sequence - 1)
        return message.data or b"", {SIGNED: (message.headers or {})[SIGNED]}

    def signed(self, name: str, subject: str, data: bytes) -> dict[str, str]:
        """Return a signature with the key of one user of the fleet."""
        return Signatures(self.guard.credentials(name)).headers(subject, data)

    async def put_refused(self, data: bytes, headers: dict[str, str]) -> None:
        """Store a state, and wait until the worker has rejected it."""
        before = self.worker.stats().bad_commands
        await put(self.nats, STATE, data, headers)
        await until_true(lambda: self.worker.stats().bad_commands > before)

    async def assert_unmoved(self) -> None:
        """Assert that the worker serves, and that worker and controller continue from the last valid state."""
        result = await self.rb.fleet.flush_cache()
        state = (await self.rb.fleet.state()).desired[MODEL]

        assert result.is_complete
        assert state.registers["pause"].command.command == "resume"
        assert state.epoch == max(result.epochs.values())
        assert self.worker.presence().state is WorkerState.SERVING
        assert (await self.rb.complete(greedy())).error is None


@contextlib.asynccontextmanager
async def attacked(tmp_path: Path) -> AsyncIterator[Attack]:
    """Run a fleet that is attacked."""
    async with (
        guarded(tmp_path) as guard,
        guard.connected("boss") as nats,
        guard.worker("w0") as (serving, _),
        rollbus.connect(guard.login("front")) as rb,
    ):
        await rb.fleet.wait_for_workers()
        await rb.fleet.pause()
        await rb.fleet.resume()
        yield Attack(guard, rb, nats, serving, tmp_path)


def state_of(command: AnyCommand, *, epoch: int = 9, model: str = MODEL) -> DesiredState:
    """Return a state with this command in its register."""
    command = msgspec.structs.replace(command, epoch=epoch, model=model)
    return DesiredState(
        model=model, epoch=epoch, registers={command.register or "": Recorded(epoch=epoch, command=command)}
    )


async def forged_states(attack: Attack) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Return states that pause the fleet, each with the headers that should prove it."""
    paused = encode_json(state_of(Pause(id="p")))
    old, old_signature = await attack.stored(1)
    other = encode_json(state_of(Pause(id="p"), model="other"))
    entries = ensure_users(attack.folder / "elsewhere", [(FLEET, Role.ADMIN, "boss")])
    namesake = Signatures(load_credentials(entries[0].path))
    return {
        "unsigned": (paused, {}),
        "deleted": (b"", {"KV-Operation": "DEL"}),
        "junk": (b'{"type":"io.nats.jetstream.api.v1.account_info_response"}', {}),
        "an old signature": (paused, old_signature),
        "replayed": (old, old_signature),
        "of another model": (other, attack.signed("boss", f"$KV.rollbus.{FLEET}.other", other)),
        "another model under this key": (other, attack.signed("boss", STATE, other)),
        "of another fleet": (
            paused,
            Signatures(attack.guard.credentials("boss")).headers(f"$KV.rollbus.G.{MODEL}", paused),
        ),
        "of a namesake": (paused, namesake.headers(STATE, paused)),
        "a worker's": (paused, attack.signed("w1", STATE, paused) or {SIGNED: "x.y.1.z"}),
        "a trainer's": (paused, attack.signed("alice", STATE, paused)),
        "a publisher's": (paused, attack.signed("carol", STATE, paused)),
    }


@pytest.mark.proves("P83")
async def test_a_forged_state_changes_nothing(tmp_path: Path) -> None:
    """A forged state changes nothing for a running worker, for a starting worker and for the next controller."""
    async with attacked(tmp_path) as attack:
        for what, (data, headers) in (await forged_states(attack)).items():
            await put(attack.nats, STATE, data, headers)
            await attack.assert_unmoved()
            await put(attack.nats, STATE, data, headers)
            async with attack.guard.worker("w1"):
                told = await until_worker(attack.rb, "w1", lambda worker: worker.state not in ON_THE_WAY)
                assert told.state is WorkerState.SERVING, what
            await until_true(lambda: len(attack.rb.fleet.workers) == 1)
        assert attack.worker.stats().bad_commands > 0


async def test_a_history_of_forged_states_does_not_change_a_worker(tmp_path: Path) -> None:
    """Forged states can push all signed states out of the bucket.

    A process that has read the last signed state keeps it and writes it again.
    """
    async with attacked(tmp_path) as attack:
        data = encode_json(state_of(Pause(id="p")))
        for _ in range(70):
            await put(attack.nats, STATE, data)
        await attack.assert_unmoved()


async def forged_commands(attack: Attack) -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """Return commands that drain or end the worker, each with the headers that should prove it."""
    drain = encode_json(Drain(id="d"))
    restart = encode_json(Restart(id="r", incarnation=attack.worker.presence().incarnation))
    boss = SUBJECTS.control("boss")
    taken = {SIGNED: f"{attack.guard.credentials('boss').certificate}.1.AAAA"}
    return {
        "unsigned": (boss, drain, {}),
        "signed for another controller": (boss, drain, attack.signed("front", SUBJECTS.control("front"), drain)),
        "signed by another controller": (boss, drain, attack.signed("front", boss, drain)),
        "signed for another fleet": (boss, drain, attack.signed("boss", "rb.v1.G.control.boss", drain)),
        "another command's signature": (boss, drain, attack.signed("boss", boss, encode_json(Resume(id="d")))),
        "with a certificate that was read": (boss, drain, taken),
        "a trainer's": (boss, drain, attack.signed("alice", boss, drain)),
        "a publisher's": (boss, drain, attack.signed("carol", boss, drain)),
        "an unsigned restart": (boss, restart, {}),
        "a publisher's restart": (boss, restart, attack.signed("carol", boss, restart)),
    }


@pytest.mark.proves("P83")
async def test_a_forged_command_changes_nothing(tmp_path: Path) -> None:
    """A worker sends no ack to a forged command, so an attacker cannot fill a command result with acks."""
    received: list[str] = []

    async with attacked(tmp_path) as attack:

        async def record_message(message: Msg) -> None:
            received.append(decode_ack(message.data).id)

        await attack.nats.subscribe(SUBJECTS.acks_to("boss"), cb=record_message)
        before = attack.worker.stats().bad_commands
        commands = await forged_commands(attack)
        for subject, data, headers in commands.values():
            await publish(attack.nats, subject, data, headers=headers or None)
        await until_true(lambda: attack.worker.stats().bad_commands >= before + len(commands))
        await attack.assert_unmoved()

    assert received == []


async def test_a_command_that_is_sent_again_has_no_second_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is sent again under its id has no second effect.

    After its signature has expired, it has no effect at all.
    """
    received: list[str] = []
    async with attacked(tmp_path) as attack:

        async def record_message(message: Msg) -> None:
            ack = decode_ack(message.data)
            received.append(f"{ack.id} {ack.error.code if ack.error else ack.status}")

        await attack.nats.subscribe(SUBJECTS.acks_to("boss"), cb=record_message)
        subject, data = SUBJECTS.control("boss"), encode_json(Abort(id="once", request_ids=("r",)))
        kept = attack.signed("boss", subject, data)
        await publish(attack.nats, subject, data, headers=kept)
        await until_true(lambda: received.count("once applied") == 1)
        await publish(attack.nats, subject, data, headers=kept)
        await until_true(lambda: received.count("once applied") == 2)
        data = encode_json(StartWeightUpdate(id="old"))
        kept = attack.signed("boss", subject, data)
        monkeypatch.setattr(authority, "MAX_AGE_S", -1.0)
        await publish(attack.nats, subject, data, headers=kept)
        await until_true(lambda: "old not_allowed" in received)
        assert "old accepted" not in received
        assert attack.worker.presence().state is WorkerState.SERVING


async def published_states(attack: Attack) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Return states that a publisher can sign and may not write, with their headers.

    Unless the name states otherwise, each is for her model, after the last epoch and on the last base.
    """
    state = (await attack.rb.fleet.state()).desired[MODEL]
    base, signature = await attack.stored(2)
    old_base, old_signature = await attack.stored(1)
    own = {BASE: base64.b64encode(base).decode(), BASE_SIGNED: signature[SIGNED]}
    older = {BASE: base64.b64encode(old_base).decode(), BASE_SIGNED: old_signature[SIGNED]}
    pause, sleep = Pause(id="p"), Sleep(id="s")
    update = UpdateWeights(id="u", version=7, source=WeightSource(path="/nowhere"))
    hers, _ = desired.record(DesiredState(model=MODEL, epoch=state.epoch), update)
    for_w0 = msgspec.structs.replace(sleep, workers=("w0",))
    in_weights = Recorded(epoch=3, command=msgspec.structs.replace(sleep, epoch=3, model=MODEL))
    states = {
        "a pause": (desired.record(state, pause)[0], own),
        "a sleep": (desired.record(state, sleep)[0], own),
        "a sleep of one worker": (desired.record(state, for_w0)[0], own),
        "a sleep as if it were weights": (
            msgspec.structs.replace(state, epoch=3, registers={**state.registers, "weights": in_weights}),
            own,
        ),
        "without what is paused": (hers, own),
        "without a base": (hers, {}),
        "on an older base": (decode_desired(old_base), older),
        "on a base of her own": (
            hers,
            {BASE: own[BASE], BASE_SIGNED: attack.signed("carol", STATE, base)[SIGNED]},
        ),
        "in the last epoch there is": (msgspec.structs.replace(state, epoch=2**53), own),
    }
    found = {}
    for what, (written, headers) in states.items():
        data = encode_json(written)
        found[what] = data, attack.signed("carol", STATE, data) | headers
    return found


async def test_a_publisher_can_change_only_weights(tmp_path: Path) -> None:
    """With a publisher's key, and a connection that may store any message, only the weights of the state can change."""
    async with attacked(tmp_path) as attack:
        forged = await published_states(attack)
        for what, (data, headers) in forged.items():
            await attack.put_refused(data, headers)
            assert attack.worker.presence().state is WorkerState.SERVING, what
        await attack.assert_unmoved()


async def test_a_publisher_cannot_return_a_running_worker_to_an_older_state(tmp_path: Path) -> None:
    """A publisher cannot return a running worker to an older state, even if the history contains only its states.

    It tries an admin's older base and a state as of a lost bucket.
    """
    async with attacked(tmp_path) as attack:
        old, signature = await attack.stored(1)
        base = {BASE: base64.b64encode(old).decode(), BASE_SIGNED: signature[SIGNED]}
        paused = decode_desired(old)
        states = [msgspec.structs.replace(paused, epoch=2) for _ in range(70)]
        states += [paused, msgspec.structs.replace(paused, bucket="another", epoch=0)]
        for state in states:
            data = encode_json(state)
            await put(attack.nats, STATE, data, attack.signed("carol", STATE, data) | base)
        await attack.put_refused(data, {})
        await attack.assert_unmoved()


async def test_the_client_of_a_publisher_refuses_every_other_command(tmp_path: Path) -> None:
    """The client of a publisher rejects every other command immediately.

    A worker that receives such a command answers `not_allowed`.
    """
    received: list[tuple[str, str]] = []
    async with attacked(tmp_path) as attack, attack.guard.connected("carol") as carol:

        async def record_message(message: Msg) -> None:
            ack = decode_ack(message.data)
            received.append((ack.id, ack.error.code if ack.error else ""))

        await carol.subscribe(SUBJECTS.acks_to("carol"), cb=record_message)
        await carol.confirm(timeout_s=SOON_S)
        for command in (
            Drain(id="drain"),
            Sleep(id="sleep", model=MODEL),
            Restart(id="restart", incarnation=attack.worker.presence().incarnation),
            StartWeightUpdate(id="other", model="other"),
        ):
            data = encode_json(command)
            headers = attack.signed("carol", SUBJECTS.control("carol"), data)
            await publish(carol, SUBJECTS.control("carol"), data, headers=headers)
        await until_true(lambda: len(received) == 3)
        async with rollbus.connect(attack.guard.login("carol")) as rb:
            await rb.fleet.wait_for_workers()
            for refused in (rb.fleet.pause, rb.fleet.resume, rb.fleet.flush_cache):
                with pytest.raises(ControlError, match="publisher carol may not send") as caught:
                    await refused()
                assert caught.value.code is ControlCode.NOT_ALLOWED
        await attack.assert_unmoved()

    assert received == [(name, "not_allowed") for name in ("drain", "sleep", "restart")]


# The signature of an upload covers the whole folder: no file can be changed, added, removed or borrowed.


BUCKET = f"rollbus-{FLEET}"
MEGABYTE = 1024**2

ObjectsAttack = Callable[[Guarded, Connection], Awaitable[None]]


async def stored(nats: Connection, name: str) -> tuple[bytes, str]:
    """Return an object's description and its signature."""
    answer = await ask(nats, f"STREAM.MSG.GET.OBJ_{BUCKET}", {"last_by_subj": info_subject(BUCKET, name)})
    return base64.b64decode(answer["message"]["data"]), headers_of(answer["message"]).get(SIGNED, "")


async def overwrite(nats: Connection, name: str, data: bytes, signature: str) -> None:
    """Replace the description of an object."""
    headers = {"Nats-Rollup": "sub"} | ({SIGNED: signature} if signature else {})
    await put(nats, info_subject(BUCKET, name), data, headers)


async def change(_guard: Guarded, nats: Connection) -> None:
    """Let the description name the chunks of another object."""
    data, signature = await stored(nats, "m/one/a")
    other, _ = await stored(nats, "m/two/a")
    fields = json.loads(data) | {"nuid": json.loads(other)["nuid"], "digest": json.loads(other)["digest"]}
    await overwrite(nats, "m/one/a", json.dumps(fields).encode(), signature)


async def unsign(_guard: Guarded, nats: Connection) -> None:
    """Store the same description without its signature."""
    data, _ = await stored(nats, "m/one/a")
    await overwrite(nats, "m/one/a", data, "")


async def leave_out(_guard: Guarded, nats: Connection) -> None:
    """Delete the description."""
    await ask(nats, f"STREAM.PURGE.OBJ_{BUCKET}", {"filter": info_subject(BUCKET, "m/one/a")})


async def borrow(_guard: Guarded, nats: Connection) -> None:
    """Store the signed description of another upload."""
    data, signature = await stored(nats, "m/two/a")
    await overwrite(nats, "m/one/a", data, signature)


async def sign_as_publisher(guard: Guarded, nats: Connection) -> None:
    """Store the description with the signature of a user that may send other commands only."""
    data, _ = await stored(nats, "m/one/a")
    headers = Signatures(guard.credentials("carol")).headers(info_subject(BUCKET, "m/one/a"), data)
    await overwrite(nats, "m/one/a", data, headers[SIGNED])


async def put_back(_guard: Guarded, nats: Connection) -> None:
    """Store a signed description of a deleted upload with the same name."""
    data, signature = await stored(nats, "m/one/a")
    fields = json.loads(data)
    fields["metadata"] = {"rollbus-folder": "0" * 32}
    subject = info_subject(BUCKET, "m/one/a")
    data = msgspec.json.encode(fields)
    signature = nats.signatures.headers(subject, data)[SIGNED]
    await overwrite(nats, "m/one/a", data, signature)


@pytest.mark.parametrize("attack", [change, unsign, leave_out, borrow, sign_as_publisher, put_back])
async def test_a_folder_that_differs_from_the_signed_folder_is_refused(attack: ObjectsAttack, tmp_path: Path) -> None:
    """A worker rejects a folder that differs from the signed one with `bad_source`, and stores nothing."""
    async with guarded(tmp_path / "auth") as guard, guard.connected("boss") as boss:
        await ensure_bucket(boss, BUCKET, max_bytes=64 * MEGABYTE)
        for name in ("one", "two"):
            await put_folder(boss, BUCKET, f"m/{name}", write_folder(tmp_path / name, a=1000, b=3000))
        await attack(guard, boss)
        with pytest.raises(ControlError) as caught:
            await fetch_folder(guard.login("w0"), f"{BUCKET}/m/one", tmp_path / "cache")

    assert caught.value.code is ControlCode.BAD_SOURCE
    assert not (tmp_path / "cache").exists()


async def test_a_worker_ignores_an_unsigned_file_in_a_signed_folder(tmp_path: Path) -> None:
    """A worker ignores an unsigned file that was added to a signed folder."""
    async with guarded(tmp_path / "auth") as guard, guard.connected("boss") as boss:
        await ensure_bucket(boss, BUCKET, max_bytes=64 * MEGABYTE)
        objects = await put_folder(boss, BUCKET, "m/one", write_folder(tmp_path / "one", a=1000))
        data, _ = await stored(boss, "m/one/a")
        added = json.loads(data) | {"name": "m/one/b"}
        await overwrite(boss, "m/one/b", json.dumps(added).encode(), "")
        fetched = await fetch_folder(guard.login("w0"), objects, tmp_path / "cache")

    assert files_in(fetched) == files_in(tmp_path / "one")


async def test_a_folder_that_was_stored_without_a_signature_can_be_signed(tmp_path: Path) -> None:
    """An admin can sign a folder that was stored without a signature, for example by NATS's own tools.

    A worker cannot sign it.
    """
    async with guarded(tmp_path / "auth") as guard, guard.connected("boss") as boss, guard.connected("w0") as worker:
        await ensure_bucket(boss, BUCKET, max_bytes=64 * MEGABYTE)
        own, boss.signatures = boss.signatures, Signatures(None)
        objects = await put_folder(boss, BUCKET, "m/one", write_folder(tmp_path / "one", a=1000, b=0))
        boss.signatures = own
        with pytest.raises(ControlError, match="has no signed objects below 'm/one'"):
            await fetch_folder(guard.login("w0"), objects, tmp_path / "cache")
        with pytest.raises(ControlError, match="use the credentials of an admin"):
            await sign_folder(worker, objects)
        assert await sign_folder(boss, objects) == 2
        fetched = await fetch_folder(guard.login("w0"), objects, tmp_path / "cache")

    assert files_in(fetched) == files_in(tmp_path / "one")
