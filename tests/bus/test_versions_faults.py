"""The store of versions when the publisher is killed, the server restarts, or answers are lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.jetstream import Unanswered, ask, put
from rollbus.bus.objects import writer
from rollbus.bus.objects.layout import ObjectInfo
from rollbus.bus.objects.writer import delete_stored
from rollbus.bus.protocol.weights import chain
from rollbus.bus.publish import publication, versions
from rollbus.bus.publish.chain_store import ChainKey, read_chain
from rollbus.schemas.errors import BusBroken, ControlCode, ControlError
from rollbus.schemas.manifest import ChainRecord, Holder
from tests.support.nats_server import opened, require_binary
from tests.support.versions import fresh_store, manifest_of, opened_store, parts_in, publish, versions_bucket
from tests.support.waits import SOON_S

pytestmark = pytest.mark.slow

MEGABYTE = 1024 * 1024


@contextlib.asynccontextmanager
async def own_server(*, max_bytes: int = 64 * MEGABYTE) -> AsyncIterator[tuple[EmbeddedServer, Connection, str, str]]:
    """Start a separate server with a fleet and its bucket."""
    require_binary()
    async with (
        EmbeddedServer() as server,
        opened(server.url) as nats,
        versions_bucket(nats, max_bytes=max_bytes) as (fleet, bucket),
    ):
        yield server, nats, fleet, bucket


async def test_a_server_restart_during_an_upload_fails_the_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server restarts during an upload, the publication fails and is removed.

    The lease stays, and the next version works.
    """
    monkeypatch.setattr(writer, "ACK_TIMEOUT_S", 0.2)
    async with own_server() as (server, nats, fleet, bucket), opened_store(server.url, fleet) as store:

        async def pieces() -> AsyncIterator[bytes]:
            for number in range(20):
                if number == 8:
                    await server.kill()
                yield bytes(MEGABYTE)

        async def restart_and_delete(own: Connection, own_bucket: str, infos: tuple[ObjectInfo, ...]) -> None:
            await server.restart()
            await delete_stored(own, own_bucket, infos)

        monkeypatch.setattr(publication, "delete_stored", restart_and_delete)
        with pytest.raises(BusBroken):
            await store.begin(1).put("a.safetensors", pieces())
        assert await parts_in(nats, bucket) == 0
        await publish(store, 1)
        assert (store.epoch, [link.version for link in store.record.links]) == (1, [1])


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_compare_and_set_without_an_answer_counts_once(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, *, is_stored: bool
) -> None:
    """If a compare-and-set gets no answer, the version is in the chain once, whether or not the write was stored."""
    real = ChainKey.write
    lost: list[int] = []

    async def write(key: ChainKey, record: ChainRecord, sequence: int) -> int | None:
        if record.links and not lost:
            lost.append(sequence)
            if is_stored:
                await real(key, record, sequence)
            raise Unanswered("the test has lost the answer")
        return await real(key, record, sequence)

    monkeypatch.setattr(ChainKey, "write", write)
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, _), opened_store(nats_url, fleet) as store:
        objects = await publish(store, 1)
        assert len(lost) == 1
        record = await read_chain(nats, fleet, "m")
        assert [link.objects for link in record.links] == [objects]


async def test_a_commit_whose_answer_was_lost_counts_after_a_takeover(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version in the chain record is not removed, even if another publisher has taken over the lease."""
    real = ChainKey.write
    lost: list[int] = []

    async def write(key: ChainKey, record: ChainRecord, sequence: int) -> int | None:
        stored = await real(key, record, sequence)
        if record.links and not lost:
            lost.append(sequence)
            taken = chain.lease_taken(record, Holder(publisher="bob", incarnation="other"), 1e6)
            assert stored is not None
            await real(key, taken, stored)
            raise Unanswered("the test has lost the answer")
        return stored

    monkeypatch.setattr(ChainKey, "write", write)
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, bucket):
        async with opened_store(nats_url, fleet) as store:
            await publish(store, 1)
            with pytest.raises(ControlError, match="bob took over") as raised:
                store.begin(2)
        assert raised.value.code is ControlCode.PUBLISHER_BUSY
        assert await parts_in(nats, bucket) == 2


async def test_old_chunks_of_an_upload_that_filled_the_bucket_are_deleted(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a killed upload filled the bucket, no publisher gets the lease while its chunks are new.

    Later they are deleted first.
    """
    async with opened(nats_url) as nats, versions_bucket(nats, max_bytes=6 * MEGABYTE) as (fleet, bucket):
        subject, part = f"$O.{bucket}.C.rb{'0' * 30}", bytes(64 * 1024)
        with contextlib.suppress(Exception):
            while True:
                await put(nats, subject, part)
        with contextlib.suppress(Exception):
            while True:
                await put(nats, subject, b"")
        store = fresh_store(nats_url, fleet)
        with pytest.raises(ControlError, match="cannot be written: maximum bytes exceeded") as raised:
            await store.open()
        assert raised.value.code is ControlCode.STORAGE
        monkeypatch.setattr(chain, "PRESSED_S", 0.0)
        async with opened_store(nats_url, fleet) as store:
            await publish(store, 1)
        assert await parts_in(nats, bucket) == 2


async def test_a_lease_is_kept_while_the_server_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed renewal of the lease is repeated, and an open publication continues."""
    monkeypatch.setattr(versions, "RENEW_S", 0.05)
    async with own_server() as (server, nats, fleet, _), opened_store(server.url, fleet) as store:
        under_way = store.begin(1)
        await under_way.put("a.safetensors", [b"x"])
        await store.note_recorded("b/versions/0")  # confirms that the object is stored
        await server.kill()
        await asyncio.sleep(0.5)
        await server.restart()
        await under_way.commit(manifest_of(store, under_way, b"x"))
        key = ChainKey(nats, fleet, "m")
        before = (await key.read()).sequence
        async with asyncio.timeout(SOON_S):
            while (await key.read()).sequence == before:  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.05)
        assert store.epoch == 1


async def test_a_server_that_loses_its_store_gets_a_new_chain(nats_url: str) -> None:
    """If a server loses its store, the open publication fails and leaves nothing.

    The next version begins a new chain.
    """
    async with (
        opened(nats_url) as nats,
        versions_bucket(nats) as (fleet, bucket),
        opened_store(nats_url, fleet) as store,
    ):
        await publish(store, 1)
        under_way = store.begin(2)
        await under_way.put("a.safetensors", [b"x"])
        manifest = manifest_of(store, under_way, b"x")
        await store.note_recorded("b/versions/0")  # confirms that the object is stored
        await ask(nats, f"STREAM.DELETE.OBJ_{bucket}")
        await store.refresh()
        assert (store.epoch, store.record.links) == (2, ())
        with pytest.raises(ControlError, match="lost its store while version 2 was being published") as raised:
            await under_way.commit(manifest)
        assert raised.value.code is ControlCode.STORAGE
        objects = await publish(store, 3)
        assert [link.objects for link in store.record.links] == [objects]
        assert await parts_in(nats, bucket) == 2
