"""Desired states in a NATS KV bucket."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import pytest
from nats.js.kv import KeyValue

from rollbus.bus.control.revisions import HISTORY
from rollbus.bus.control.store import MAX_STATE_BYTES, DesiredStore
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.protocol.fleet import desired
from rollbus.bus.subjects import BUCKET, Subjects
from rollbus.schemas import limits
from rollbus.schemas.control import DesiredState, FlushCache, Pause, Resume, UpdateWeights
from rollbus.schemas.errors import ControlError, RemoteProtocolError
from rollbus.schemas.messages import decode_desired
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

        assert second is not None
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

        assert entry.value is not None
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
