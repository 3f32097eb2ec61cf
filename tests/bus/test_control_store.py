"""Desired states in a NATS KV bucket."""

import asyncio
import base64
import json
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from nats.aio.msg import Msg
from nats.js.kv import KeyValue

from rollbus.bus.auth.credentials import Role, Signatures, load_credentials
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.control import revisions as module
from rollbus.bus.control.revisions import HISTORY, Revisions
from rollbus.bus.control.store import MAX_STATE_BYTES, DesiredStore
from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.jetstream import NO_MESSAGE, ask
from rollbus.bus.protocol.fleet import desired
from rollbus.bus.subjects import BUCKET, Subjects
from rollbus.schemas import limits
from rollbus.schemas.control import DesiredState, FlushCache, Pause, Resume, UpdateWeights
from rollbus.schemas.errors import ControlError, RemoteProtocolError
from rollbus.schemas.messages import decode_desired, encode_json
from rollbus.schemas.weights import WeightSource
from tests.support.nats_server import opened, require_binary

MODEL = "org/model.v1"


async def test_recorded_commands_can_be_read_in_order(nats_url: str, fleet: str) -> None:
    """The store is empty at first.

    It then returns each recorded command, in order, under the epoch that `record` returned.
    """
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        assert await store.read(MODEL) is None
        first, epoch = await store.record(MODEL, Pause(id="p"))
        second, next_epoch = await store.record(MODEL, Resume(id="r"))

        assert (epoch, next_epoch) == (1, 2)
        assert await store.read(MODEL) == second
        assert first.registers["pause"].command.command == "pause"
        assert second.registers["pause"].command == Resume(id="r", epoch=2, model=MODEL)
        assert await store.read("other") is None


async def test_each_epoch_has_its_own_recording_time(nats_url: str, fleet: str) -> None:
    """Each epoch has its own recording time, in order. Unknown epochs and epochs beyond the history have no time."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        assert await store.recorded_at(MODEL, 1) is None
        await store.record(MODEL, Pause())
        await store.record("other", Pause())
        await store.record(MODEL, Resume())
        first, second = await store.recorded_at(MODEL, 1), await store.recorded_at(MODEL, 2)
        for _ in range(HISTORY - 1):
            await store.record(MODEL, FlushCache())

        assert (first.utcoffset(), first < second) == (timedelta(0), True)
        assert await store.recorded_at(MODEL, 1) is None
        assert await store.recorded_at(MODEL, 2) == second
        assert await store.recorded_at(MODEL, HISTORY + 2) is None


async def test_nats_tools_can_read_the_bucket(nats_url: str, fleet: str) -> None:
    """NATS tools can read the KV bucket.

    It has one value for each model, and its history is the log of the commands.
    """
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        for i in range(3):
            await store.record(MODEL, FlushCache(id=f"f{i}"))
        bucket: KeyValue = await nats.jetstream().key_value(BUCKET)
        key = f"{fleet}.org=2Fmodel=2Ev1"
        entry = await bucket.get(key)
        history = await bucket.history(key)
        status = await bucket.status()

        assert json.loads(entry.value)["registers"]["flush"]["command"]["id"] == "f2"
        assert [decode_desired(old.value or b"").epoch for old in history] == [1, 2, 3]
        assert status.history == HISTORY
        assert store.subject(MODEL) == f"$KV.{BUCKET}.{key}"


async def test_a_state_that_would_be_too_large_is_refused(nats_url: str, fleet: str) -> None:
    """A state that would be too large raises an error with its size and the limit, and nothing is written."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        path = "/" + "x" * 1100
        names = tuple(f"w{i}" for i in range(limits.MAX_WORKER_OVERRIDES))
        command = UpdateWeights(version=1, source=WeightSource(path=path), workers=names)
        with pytest.raises(ControlError, match=rf"would take \d+ bytes; allowed: {MAX_STATE_BYTES}"):
            await store.record("m", command)

        assert await store.read("m") is None


@pytest.mark.parametrize("garbage", [b"garbage", b"{}", b'{"model": "other"}', b"\xff", b'{"model": "m", "epoch": -1}'])
async def test_an_undecodable_state_is_an_error_until_a_reset(nats_url: str, fleet: str, garbage: bytes) -> None:
    """If a state cannot be decoded, reading and recording raise an error that names the key and the reset.

    After the reset, epochs are higher than before.
    """
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        _, epoch = await store.record("m", Pause(id="before"))
        await nats.jetstream().publish(store.subject("m"), garbage)
        for attempt in (store.read("m"), store.record("m", Pause())):
            with pytest.raises(RemoteProtocolError, match=rf"{fleet}.m cannot be used: .*; a reset clears it"):
                await attempt
        assert await store.read_all() == {}

        assert await store.reset("m")
        state, new_epoch = await store.record("m", Pause(id="p"))
        assert set(state.registers) == {"pause"}
        assert new_epoch > epoch


@pytest.mark.proves("P74")
async def test_a_reset_clears_the_state_under_a_higher_epoch(nats_url: str, fleet: str) -> None:
    """A reset clears the desired state under a higher epoch. Without a state, it does nothing."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        assert not await store.reset("m")
        await store.record("m", Pause(workers=("a",)))
        assert await store.reset("m")
        state = await store.read("m")

        assert (state.epoch, state.registers, state.workers) == (2, {}, {})
        assert not await store.reset("m")
        assert (await store.record("m", Pause()))[1] == 3


@pytest.mark.proves("P74")
async def test_a_deleted_key_is_an_empty_state_and_its_epochs_continue(nats_url: str, fleet: str) -> None:
    """If NATS tools delete a key, the desired state is empty, and later commands get higher epochs."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        for _ in range(3):
            _, epoch = await store.record("m", Pause())
        await (await nats.jetstream().key_value(BUCKET)).delete(f"{fleet}.m")

        deleted = await store.read("m")
        assert (deleted.registers, deleted.epoch >= epoch) == ({}, True)
        assert (await store.record("m", Pause()))[1] > deleted.epoch


async def test_the_models_of_the_fleet_are_listed(nats_url: str, fleet: str) -> None:
    """`models` returns the models of this fleet for which a command was recorded."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        assert await store.models() == ()
        await DesiredStore(nats, Subjects(f"{fleet}-other")).record("theirs", Pause())
        for model in (MODEL, "b"):
            await store.record(model, Pause())

        assert await store.models() == ("b", MODEL)
        assert {model: state.epoch for model, state in (await store.read_all()).items()} == {"b": 1, MODEL: 1}


async def test_a_writer_that_loses_the_race_decides_again_on_the_new_state(nats_url: str, fleet: str) -> None:
    """A writer that loses the race decides again on the state that the first writer wrote."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        seen: list[int] = []

        async with asyncio.TaskGroup() as tasks:

            def change(state: DesiredState) -> DesiredState:
                seen.append(state.epoch)
                return desired.record(state, FlushCache())[0]

            for _ in range(3):
                tasks.create_task(store.change("m", change))
        state = await store.read("m")

        assert state.epoch == 3
        assert max(seen) == 2


@pytest.mark.slow
async def test_a_missing_bucket_is_created_by_the_next_command(tmp_path: Path) -> None:
    """The first command creates the bucket, although a subscription exists on its subject.

    If the bucket is deleted, the next command creates it again.
    """
    require_binary()
    async with EmbeddedServer(store_dir=tmp_path) as server, opened(server.url) as nats:
        store = DesiredStore(nats, Subjects("f"))
        await nats.subscribe(store.subject("m"))
        assert await store.read("m") is None
        assert await store.models() == ()
        assert not await store.reset("m")
        for _ in range(2):
            assert (await store.record("m", Pause()))[1] == 1
            await nats.jetstream().delete_key_value(BUCKET)


async def test_a_state_keeps_the_id_of_its_bucket(nats_url: str, fleet: str) -> None:
    """The first write draws the id of the bucket.

    Later writes and resets keep the id, and a new bucket has another id.
    """
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        first, _ = await store.record("m", Pause())
        await store.reset("m")
        second, _ = await store.record("m", Resume())
        await ask(nats, f"STREAM.PURGE.KV_{BUCKET}", {"filter": store.subject("m")})
        other, _ = await store.record("m", Pause())

        assert first.bucket == second.bucket != ""
        assert other.bucket not in ("", first.bucket)
        assert await store.read("m") == other


async def test_a_state_without_a_bucket_id_gets_a_bucket_id(nats_url: str, fleet: str) -> None:
    """A state without a bucket id gets one with the next recorded command, and its epochs continue."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        await store.record("m", Pause())
        await nats.jetstream().publish(store.subject("m"), b'{"model": "m", "epoch": 7}')
        before = await store.read("m")
        after, epoch = await store.record("m", Pause())

        assert (before.bucket, epoch) == ("", 8)
        assert after.bucket != ""


# Which revisions of a signed state are valid. The bucket is simulated.


REVISIONS_MODEL = "m"
SUBJECT = "$KV.rollbus.F.m"


class Bucket:
    """A simulated JetStream API that serves as the connection of `Revisions`."""

    def __init__(self, folder: Path) -> None:
        boss, worker = ensure_users(folder, [("F", Role.ADMIN, "boss"), ("F", Role.WORKER, "w")])
        self._author = Signatures(load_credentials(boss.path))
        self.signatures = Signatures(load_credentials(worker.path))
        self.created = "monday"
        self.messages: dict[int, dict[str, Any]] = {}
        self.num_asked = 0

    def write(self, sequence: int, epoch: int, *, is_signed: bool = True) -> None:
        """Store a state."""
        data = encode_json(DesiredState(model=REVISIONS_MODEL, epoch=epoch))
        headers = self._author.headers(SUBJECT, data) if is_signed else {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.messages[sequence] = {
            "seq": sequence,
            "time": "2026-01-01T00:00:00Z",
            "data": base64.b64encode(data).decode(),
            "hdrs": base64.b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode(),
        }

    async def request(self, subject: str, payload: bytes, **_: object) -> Msg:
        """Answer a JetStream request."""
        self.num_asked += 1
        answer: dict[str, Any] = {"created": self.created}
        if ".MSG.GET." in subject:
            question = json.loads(payload)
            found = [number for number in self.messages if number >= question.get("seq", 0)]
            number = max(found, default=None) if "last_by_subj" in question else min(found, default=None)
            answer = {"error": {"err_code": NO_MESSAGE}} if number is None else {"message": self.messages[number]}
        return Msg(cast(Connection, self), data=json.dumps(answer).encode())

    async def epochs(self, revisions: Revisions) -> tuple[int | None, int]:
        """Return the epoch that is found and the sequence number for the next write."""
        found = await revisions.find(REVISIONS_MODEL)
        return None if found.state is None else found.state.epoch, found.sequence


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    """Return a bucket with the epochs 1 and 2."""
    bucket = Bucket(tmp_path)
    bucket.write(10, 1)
    bucket.write(50, 2)
    return bucket


def reader(bucket: Bucket) -> Revisions:
    """Return a new `Revisions` that has not read anything."""
    return Revisions(cast(Connection, bucket), Subjects("F"))


async def test_an_older_epoch_does_not_count_again(bucket: Bucket) -> None:
    """An older epoch that is written again does not count, neither for a known reader nor for a new one."""
    early = reader(bucket)
    assert await bucket.epochs(early) == (2, 50)
    bucket.write(60, 1)

    assert await bucket.epochs(early) == (2, 60)
    assert await bucket.epochs(reader(bucket)) == (2, 60)


async def test_older_epochs_are_accepted_if_the_bucket_was_created_again(bucket: Bucket) -> None:
    """A reader accepts older epochs if the server states that the bucket was created again."""
    early = reader(bucket)
    assert await bucket.epochs(early) == (2, 50)
    bucket.messages.clear()
    bucket.created = "tuesday"
    bucket.write(60, 1)

    assert await bucket.epochs(early) == (1, 60)


async def test_a_server_that_is_behind_returns_its_older_state(bucket: Bucket) -> None:
    """If the server is behind, the reader returns the server's older state. `ReadOrder` handles this case."""
    early = reader(bucket)
    assert await bucket.epochs(early) == (2, 50)
    del bucket.messages[50]

    assert await bucket.epochs(early) == (1, 10)


async def test_a_reader_keeps_its_state_if_the_history_has_no_signed_state(bucket: Bucket) -> None:
    """If all signed states have left the history, a reader keeps the state that it knows. A new reader finds none."""
    early = reader(bucket)
    assert await bucket.epochs(early) == (2, 50)
    bucket.messages.clear()
    for number in range(51, 60):
        bucket.write(number, 9, is_signed=False)

    assert await bucket.epochs(early) == (2, 59)
    assert await bucket.epochs(reader(bucket)) == (None, 59)


async def test_a_read_of_a_known_state_needs_one_call(bucket: Bucket) -> None:
    """A read takes one call for a known state, two for a new revision, and three for one that does not count."""
    early = reader(bucket)

    async def cost() -> int:
        before = bucket.num_asked
        await bucket.epochs(early)
        return bucket.num_asked - before

    assert [await cost(), await cost()] == [4, 1]
    bucket.write(60, 3)
    assert [await cost(), await cost()] == [2, 1]
    bucket.write(61, 9, is_signed=False)
    assert [await cost(), await cost()] == [3, 1]


async def test_names_without_a_valid_state_do_not_displace_valid_states(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader remembers a limited number of models; invented names leave the last valid state in memory."""
    monkeypatch.setattr(module, "MAX_KNOWN", 3)
    revisions = reader(bucket)
    before = await bucket.epochs(revisions)
    for number in range(20):
        assert (await revisions.find(f"invented-{number}")).state is None
    bucket.messages.clear()
    bucket.write(60, 9, is_signed=False)

    assert revisions.debug_state() == {"models": 3, "refused": 40}
    assert (await bucket.epochs(revisions))[0] == before[0] == 2
