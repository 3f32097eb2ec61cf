"""Published versions in the store: a committed version is complete, and an uncommitted version leaves nothing."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from rollbus.bus.nats.jetstream import ApiError, put
from rollbus.bus.objects.catalog import delete_prefix, list_objects, list_subjects
from rollbus.bus.objects.layout import ObjectInfo, ObjectOptions, info_subject, info_subjects
from rollbus.bus.objects.reader import ObjectReader
from rollbus.bus.objects.uploads import Cleaning
from rollbus.bus.objects.writer import put_folder
from rollbus.bus.protocol.weights import chain
from rollbus.bus.publish import versions
from rollbus.bus.publish.chain_store import ChainKey, read_chain
from rollbus.schemas.errors import ControlCode, ControlError, LocalProtocolError
from rollbus.schemas.manifest import CHAIN_OBJECT, MANIFEST, MAX_MANIFEST_BYTES, ChainRecord, decode_manifest
from tests.support.nats_server import count_tasks, opened
from tests.support.objects import write_folder
from tests.support.versions import (
    folders_in,
    fresh_store,
    manifest_of,
    opened_store,
    parts_in,
    publish,
    store_with_bucket,
    versions_bucket,
)

MEGABYTE = 1024 * 1024
HOUR_S = 3600.0


async def test_a_version_is_published_and_read(nats_url: str) -> None:
    """Pieces of any size become one object that readers verify. The manifest and the chain record name the folder."""
    content = os.urandom(9 * MEGABYTE + 3)

    async def pieces() -> AsyncIterator[memoryview]:
        for start in range(0, len(content), 700_001):
            yield memoryview(content)[start : start + 700_001]

    tasks_before = await count_tasks()
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, bucket):
        assert await read_chain(nats, fleet, "m") is None
        async with opened_store(nats_url, fleet) as store:
            publication = store.begin(7)
            info = await publication.put("a.safetensors", pieces())
            await publication.put("empty", [])
            assert (info.size, info.name) == (len(content), f"{publication.objects.partition('/')[2]}/a.safetensors")
            assert await list_objects(nats, bucket, publication.objects.partition("/")[2]) == ()
            manifest = manifest_of(store, publication, content)
            await publication.commit(manifest)
            async with ObjectReader(nats_url, name="test").open_folder(publication.objects) as folder:
                assert await folder.read("a.safetensors", len(content)) == content
                assert await folder.read("empty", 0) == b""
                assert decode_manifest(await folder.read(MANIFEST, MAX_MANIFEST_BYTES)) == manifest
            used, limit = await store.used_and_limit()
            assert len(content) < used < limit
            assert store.record.links == manifest.links
            with pytest.raises(LocalProtocolError, match="is over"):
                await publication.put("b", [b"x"])
        record = await read_chain(nats, fleet, "m")
    assert (record.links, record.holder, record.epoch) == (manifest.links, None, 1)
    assert await count_tasks() == tasks_before


@pytest.mark.proves("P84")
async def test_a_second_publisher_is_refused_with_the_name_of_the_first(nats_url: str) -> None:
    """A second publisher is rejected with the name of the first until the first releases its lease.

    Epochs only increase.
    """
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, _):
        async with opened_store(nats_url, fleet, publisher="alice") as first:
            tasks_before = await count_tasks()
            bob = fresh_store(nats_url, fleet, publisher="bob")
            with pytest.raises(
                ControlError, match=r"alice publishes weights of 'm' and renewed its lease \d+\.\d s"
            ) as raised:
                await bob.open()
            assert raised.value.code is ControlCode.PUBLISHER_BUSY
            assert await count_tasks() == tasks_before
            assert first.epoch == 1
        async with opened_store(nats_url, fleet, publisher="bob") as second:
            assert second.epoch == 2


async def test_exactly_one_of_two_concurrent_publishers_gets_the_lease(nats_url: str) -> None:
    """Of publishers that open at once, a compare-and-set chooses one. The errors of the other publishers name it."""
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, _):
        stores = {name: fresh_store(nats_url, fleet, publisher=name) for name in ("alice", "bob", "carol")}
        errors: dict[str, ControlError] = {}

        async def open_store(name: str) -> None:
            try:
                await stores[name].open()
            except ControlError as error:
                errors[name] = error

        async with asyncio.TaskGroup() as tasks:
            for name in stores:
                tasks.create_task(open_store(name))
        [winner] = stores.keys() - errors.keys()
        assert all(f"{winner} publishes weights" in error.message for error in errors.values())
        await publish(stores[winner], 1, publisher=winner)
        await stores[winner].close()


@pytest.mark.proves("P84")
async def test_a_publisher_whose_lease_expired_cannot_commit(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher whose lease expired cannot commit. Its error names the new publisher, and its objects are removed."""
    monkeypatch.setattr(versions, "RENEW_S", 1000.0)
    monkeypatch.setattr(chain, "LEASE_S", 0.0)
    monkeypatch.setattr(chain, "MARGIN_S", 0.0)
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, bucket):
        async with opened_store(nats_url, fleet) as sleeper:
            publication = sleeper.begin(1)
            await publication.put("a.safetensors", [b"old"])
            manifest = manifest_of(sleeper, publication, b"old")
            async with opened_store(nats_url, fleet, publisher="bob") as other:
                objects = await publish(other, 1, publisher="bob")
                with pytest.raises(ControlError, match=r"bob took over .* in epoch 2") as raised:
                    await publication.commit(manifest)
                assert raised.value.code is ControlCode.PUBLISHER_BUSY
                with pytest.raises(ControlError, match="bob took over"):
                    sleeper.begin(2)
                with pytest.raises(ControlError, match="bob took over"):
                    await sleeper.note_recorded(objects)
                assert await parts_in(nats, bucket) == 2
        record = await read_chain(nats, fleet, "m")
    assert [link.objects for link in record.links] == [objects]


async def test_the_successor_of_a_killed_publisher_waits_for_the_lease(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor of a killed publisher gets the lease when it has expired, and is rejected while it is renewed."""
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, _), opened_store(nats_url, fleet) as first:
        monkeypatch.setattr(chain, "LEASE_S", 1.0)
        monkeypatch.setattr(chain, "MARGIN_S", 0.0)
        second = fresh_store(nats_url, fleet)
        await second.open()
        assert second.epoch == 2
        with pytest.raises(ControlError, match="alice took over"):
            await first.note_recorded("b/versions/1")
        monkeypatch.setattr(chain, "LEASE_S", 1000.0)
        third = fresh_store(nats_url, fleet)
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(refusal(third))
            await asyncio.sleep(0.5)
            await second.note_recorded("b/versions/1")  # renews the lease
        assert "alice publishes weights" in opening.result()
        await second.close()


async def refusal(store: versions.VersionChain) -> str:
    """Return the error message of a failed `open`."""
    with pytest.raises(ControlError) as raised:
        await store.open()
    return raised.value.message


@pytest.mark.proves("P85")
async def test_a_publication_that_fails_leaves_nothing(nats_url: str) -> None:
    """A publication leaves nothing if an object fails, a name or manifest is invalid, or it is discarded or unfinished.

    The next publication works.
    """
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, bucket):
        async with opened_store(nats_url, fleet) as store:

            async def broken() -> AsyncIterator[bytes]:
                yield bytes(6 * MEGABYTE)
                raise OSError("the trainer failed")

            closed: list[bool] = []

            async def endless() -> AsyncIterator[bytes]:
                try:
                    while True:
                        yield bytes(6 * MEGABYTE)
                finally:
                    closed.append(True)

            with pytest.raises(ControlError, match="has no room"):
                await store.begin(1).put("a.safetensors", endless())
            assert closed == [True]

            with pytest.raises(OSError, match="the trainer failed"):
                await store.begin(1).put("a.safetensors", broken())

            publication = store.begin(1)
            with pytest.raises(ControlError, match="allowed: a relative path"):
                await publication.put("../a", [b""])
            await publication.put("a", [b"x"])
            await publication.discard()
            await publication.discard()
            await store.begin(1).put("a", [b"x"])
            await publish(store, 1)
        assert await parts_in(nats, bucket) == 2


@pytest.mark.proves("P85")
async def test_a_cancelled_publication_leaves_nothing(nats_url: str) -> None:
    """A publication that is cancelled at any moment is either committed completely or absent."""
    async with store_with_bucket(nats_url) as (nats, bucket, store):
        for turns in range(0, 300, 10):
            before = await parts_in(nats, bucket)
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(publish(store, 1, content=bytes(MEGABYTE)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
            await store.note_recorded("b/versions/0")  # reads the chain record
            if task.cancelled() and len(store.record.links) == before // 2:
                assert await parts_in(nats, bucket) - before in {0, 2}
            await store.clean(set(), young_s=0.0)
            assert await parts_in(nats, bucket) == 2 * len(store.record.links)


async def test_a_cancelled_close_leaves_nothing_open(nats_url: str) -> None:
    """A close that is cancelled while the renewal of the lease ends still disconnects."""
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, _):
        before, store = await count_tasks(), fresh_store(nats_url, fleet)
        await store.open()
        async with asyncio.TaskGroup() as tasks:
            closing = tasks.create_task(store.close())
            await asyncio.sleep(0)
            closing.cancel()
        assert await count_tasks() == before


async def test_a_full_bucket_is_an_error_and_the_next_version_works(nats_url: str) -> None:
    """The error of a full bucket states used, required and allowed bytes.

    The objects are removed, and the next version works.
    """
    async with opened(nats_url) as nats, versions_bucket(nats, max_bytes=12 * MEGABYTE) as (fleet, bucket):
        async with opened_store(nats_url, fleet) as store:
            publication = store.begin(1)
            await publication.put("a.safetensors", [bytes(4 * MEGABYTE)])
            with pytest.raises(ControlError, match=rf"has no room: \d+ of {12 * MEGABYTE} bytes are used") as raised:
                await publication.put("b", (bytes(MEGABYTE) for _ in range(9)))
            assert raised.value.code is ControlCode.STORAGE
            assert await parts_in(nats, bucket) == 0
            await publish(store, 1, content=bytes(6 * MEGABYTE))
        async with opened_store(nats_url, fleet) as store:
            assert store.record.links[-1].version == 1


async def test_a_publication_without_a_bucket_is_an_error(nats_url: str) -> None:
    """If the bucket was deleted, the error states this and the next step."""
    async with opened(nats_url) as nats:
        async with versions_bucket(nats) as (fleet, _):
            store = fresh_store(nats_url, fleet)
            await store.open()
        with pytest.raises(ControlError, match=r"does not exist; an admin creates it: rollbus make-queue") as raised:
            await store.used_and_limit()
        assert raised.value.code is ControlCode.STORAGE
        assert await read_chain(nats, fleet, "m") is None


async def test_an_adapter_is_published_beside_the_weights(nats_url: str) -> None:
    """An adapter is published in a separate folder, and the chain of the weights continues."""
    async with store_with_bucket(nats_url) as (_, _, store):
        await publish(store, 1)
        objects = await publish(store, 5, adapter="my lora")
        await publish(store, 2, delta=True)
        assert [link.version for link in store.record.links] == [1, 2]
        async with ObjectReader(nats_url, name="test").open_folder(objects) as folder:
            assert decode_manifest(await folder.read(MANIFEST, MAX_MANIFEST_BYTES)).adapter == "my lora"


@pytest.mark.proves("P86")
async def test_cleaning_keeps_only_the_versions_and_adapters_that_are_needed(nats_url: str) -> None:
    """Cleaning keeps the recorded and the previous version with their chains, and recorded adapters.

    It keeps other uploads.
    """
    async with store_with_bucket(nats_url) as (nats, bucket, store):
        folders = {}
        for version, delta in ((1, False), (2, True), (3, False), (4, True), (5, True), (6, False), (7, True)):
            folders[version] = await publish(store, version, delta=delta)
        adapters = [await publish(store, version, adapter="lora") for version in (1, 2, 3)]
        for objects in (folders[4], *adapters):
            await store.note_recorded(objects)

        await store.clean({folders[4], adapters[2]})
        assert await folders_in(nats, bucket) == {*folders.values(), *adapters}

        await store.clean({folders[4], adapters[2]}, young_s=0.0)
        left = {folders[3], folders[4], folders[6], folders[7], *adapters[1:]}
        assert await folders_in(nats, bucket) == left
        assert await parts_in(nats, bucket) == 2 * len(left)
        assert {link.version for link in store.record.links} == {3, 4, 6, 7}

        await store.note_recorded(folders[7])
        for _ in range(2):
            await store.clean({folders[7]}, young_s=0.0)
        assert await folders_in(nats, bucket) == left - set(adapters)
        await publish(store, 8, delta=True)
        assert [link.version for link in store.record.links] == [3, 4, 6, 7, 8]


async def test_cleaning_deletes_old_chunks_that_no_object_names(nats_url: str, tmp_path: Path) -> None:
    """Cleaning deletes old chunks that no object names. Chunks of other uploads stay while an object names them.

    It skips objects of other programs that it cannot read.
    """
    async with store_with_bucket(nats_url) as (nats, bucket, store):
        await put_folder(nats, bucket, "m/weights/1-abcdefgh", write_folder(tmp_path, a=10))
        await put_folder(nats, bucket, "m/weights/2-abcdefgh", write_folder(tmp_path, a=10))
        old = (await publish(store, 0)).partition("/")[2]
        await publish(store, 1)
        under_way = store.begin(2)
        await under_way.put("a.safetensors", [b"x"])
        await store.note_recorded("b/versions/0")
        for nuid in ("rb" + "0" * 30, "X" * 22, "Y" * 22):
            await put(nats, f"$O.{bucket}.C.{nuid}", b"of a killed upload")
        link = ObjectInfo(
            name="link", bucket=bucket, nuid="Z", options=ObjectOptions(link={"bucket": "b", "name": "n"})
        )
        junk = {"link": msgspec.json.encode(link), "named": b'{"nuid": "YYYYYYYYYYYYYYYYYYYYYY", "size": "x"}'}
        for name, data in {**junk, "versions/9-1-aaaaaaaa/x": b"{", f"{old}/x": b"{"}.items():
            await put(nats, info_subject(bucket, name), data)
        for _ in range(2):
            await store.clean(set())
            assert await parts_in(nats, bucket) == 10
        await store.clean(set(), young_s=0.0)
        assert await parts_in(nats, bucket) == 6
        assert len(await list_subjects(nats, bucket, info_subjects(bucket))) == 3 + 2 + 4
        await under_way.commit(manifest_of(store, under_way, b"x"))
        assert await delete_prefix(nats, f"{bucket}/m") == 2
        assert await parts_in(nats, bucket) == 5


@pytest.mark.parametrize("is_object", [True, False])
async def test_after_an_undecodable_chain_record_the_next_lease_starts_a_chain(nats_url: str, is_object: bool) -> None:
    """If the chain record cannot be decoded, the next lease starts a new chain in an epoch above all earlier ones."""
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, _):
        async with opened_store(nats_url, fleet) as store:
            await publish(store, 1)
            epoch = store.epoch
        key = ChainKey(nats, fleet, "m")
        stored = await key.read()
        if is_object:
            assert await key.write(replace(stored.record, v="no"), stored.sequence) is not None
        else:
            await put(nats, info_subject(key.bucket, CHAIN_OBJECT), b"{", {"Nats-Rollup": "sub"})
        async with opened_store(nats_url, fleet) as store:
            assert store.record.links == ()
            assert store.epoch > epoch
            await publish(store, 2)


# Cleaning after the loss of the record and after a new lease, and its errors.


async def test_without_the_record_cleaning_keeps_the_versions_of_the_manifest(nats_url: str) -> None:
    """If the record was lost, cleaning keeps the versions that the manifest of the recorded version names."""
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, bucket):
        async with opened_store(nats_url, fleet) as store:
            unneeded = await publish(store, 1)
            needed = [await publish(store, 2), await publish(store, 3, delta=True), await publish(store, 4, delta=True)]
        key = ChainKey(nats, fleet, "m")
        stored = await key.read()
        assert await key.write(replace(stored.record, v="no"), stored.sequence) is not None
        async with opened_store(nats_url, fleet) as store:
            newest = await publish(store, 5)
            assert unneeded in await folders_in(nats, bucket)
            for _ in range(2):
                await store.clean({needed[-1]}, young_s=0.0)
                assert await folders_in(nats, bucket) == {*needed, newest}
            assert store.record.noted == (needed[-1],)


async def test_a_new_lease_deletes_the_objects_of_a_killed_publication(nats_url: str) -> None:
    """A new lease deletes uncommitted objects of a killed publication at any age, and keeps other uploads."""
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, bucket):
        async with opened_store(nats_url, fleet) as store:
            await publish(store, 1)
        for nuid in ("rb" + "0" * 30, "X" * 22):
            await put(nats, f"$O.{bucket}.C.{nuid}", b"of another upload")
        async with opened_store(nats_url, fleet):
            assert await parts_in(nats, bucket) == 2 + 1


async def test_a_refreshed_record_has_a_commit_whose_answer_was_lost(nats_url: str) -> None:
    """`refresh` reads a commit whose answer was lost, also if the publisher's copy is older."""
    async with store_with_bucket(nats_url) as (_, _, store):
        await publish(store, 1)
        stored = store.record
        store.record = replace(stored, links=())
        await store.refresh()
        assert store.record == stored


async def test_a_failed_cleanup_is_a_typed_error_if_the_lease_needs_room(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cleanup that fails raises a typed error if the lease needs room. Otherwise it is only logged."""

    async def refused(_: object) -> None:
        raise ApiError(10000, "the test refuses")

    monkeypatch.setattr(Cleaning, "list_folders", refused)
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, _):
        async with opened_store(nats_url, fleet):
            assert "versions.cleanup_failed model=m" in caplog.text
        real, tries = ChainKey.write, []

        async def full(key: ChainKey, record: ChainRecord, sequence: int) -> int | None:
            tries.append(sequence)
            if len(tries) == 1:
                raise ControlError(ControlCode.STORAGE, "full")
            return await real(key, record, sequence)

        monkeypatch.setattr(ChainKey, "write", full)
        with pytest.raises(ControlError, match="cannot be cleaned: the test refuses") as raised:
            await fresh_store(nats_url, fleet).open()
        assert raised.value.code is ControlCode.STORAGE
