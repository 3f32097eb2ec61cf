"""Cleaning after the loss of the record and after a new lease, and its errors."""

import pytest
from msgspec.structs import replace

from rollbus.bus.nats.jetstream import ApiError, put
from rollbus.bus.objects.uploads import Cleaning
from rollbus.bus.publish.chain_store import ChainKey
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.manifest import ChainRecord
from tests.support.nats_server import opened
from tests.support.versions import folders_in, fresh_store, opened_store, parts_in, publish, versions_bucket


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
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, _), opened_store(nats_url, fleet) as store:
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
