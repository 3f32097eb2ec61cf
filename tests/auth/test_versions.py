"""Published versions with roles: only publishers can publish, and workers can fetch."""

from pathlib import Path

import msgspec
import pytest

from rollbus.bus.nats.jetstream import put
from rollbus.bus.objects.layout import ObjectInfo, info_subject
from rollbus.bus.objects.reader import ObjectReader
from rollbus.bus.publish.chain_store import read_chain
from rollbus.bus.publish.versions import VersionStore
from rollbus.bus.subjects import Subjects, published_bucket
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.manifest import (
    CHAIN,
    CHAIN_OBJECT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    ChainRecord,
    Holder,
    decode_manifest,
)
from tests.auth.support import FLEET, MODEL, Guarded, guarded
from tests.support.patience import SOON_S
from tests.support.versions import parts_in, publish

pytestmark = pytest.mark.slow

BUCKET = published_bucket(FLEET, MODEL)


def store_of(guard: Guarded, name: str) -> VersionStore:
    """Return a version store with the credentials of a user."""
    return VersionStore(guard.login(name), Subjects(FLEET), MODEL, publisher=name)


async def test_a_publisher_publishes_and_workers_fetch(tmp_path: Path) -> None:
    """A publisher can publish with several ranks and delete old versions, and a worker can fetch the result.

    All of it is signed, and the server denies nothing.
    """
    async with guarded(tmp_path) as guard, guard.connected("boss") as boss, guard.connected("carol") as carol:
        store, rank = store_of(guard, "carol"), store_of(guard, "carol")
        await store.open()
        await rank.open(with_lease=False)
        first = await publish(store, 1, publisher="carol")
        publication = store.begin(2)
        await publication.announce()
        joined = await rank.join(2, SOON_S)
        await joined.put("b", [b"of another rank"])
        await joined.give(1, [])
        assert [given.rank for given in await publication.collect(2, SOON_S)] == [1]
        await publication.discard()
        second = await publish(store, 2, publisher="carol")
        await store.note_recorded(second)
        await store.clean({second}, young_s=0.0)
        await rank.close()
        await store.close()

        for nats in (boss, carol):
            record = await read_chain(nats, FLEET, MODEL)
            assert [link.objects for link in record.links] == [second]
        assert await parts_in(boss, BUCKET) == 2
        reader = ObjectReader(guard.login("w0"), name="test")
        async with reader.open_folder(second) as folder:
            manifest = decode_manifest(await folder.read(MANIFEST, MAX_MANIFEST_BYTES))
            assert (manifest.version, manifest.publisher) == (2, "carol")
        with pytest.raises(ControlError) as raised:
            async with reader.open_folder(first):
                pass
        assert raised.value.code is ControlCode.BAD_SOURCE
        assert guard.violations() == []


async def test_a_publisher_ignores_an_unsigned_chain_record(tmp_path: Path) -> None:
    """A publisher ignores an unsigned chain record and acquires the lease in a higher epoch."""
    async with guarded(tmp_path) as guard, guard.connected("boss") as boss:
        forged = ChainRecord(model=MODEL, epoch=0, holder=Holder(publisher="mallory", incarnation="x"))
        info = ObjectInfo(
            name=CHAIN_OBJECT, bucket=BUCKET, nuid="chain", metadata={CHAIN: msgspec.json.encode(forged).decode()}
        )
        sequence = await put(boss, info_subject(BUCKET, CHAIN_OBJECT), msgspec.json.encode(info))
        store = store_of(guard, "carol")
        await store.open()
        assert store.epoch > sequence
        await store.close()
