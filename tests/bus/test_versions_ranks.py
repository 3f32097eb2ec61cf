"""A version that several ranks publish together is published completely or not at all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest

from rollbus.bus.nats.connection import Connection
from rollbus.bus.objects.catalog import list_objects
from rollbus.bus.objects.reader import ObjectReader
from rollbus.bus.publish import chain_store, versions
from rollbus.bus.publish import publication as module
from rollbus.bus.publish.chain_store import ChainKey
from rollbus.bus.publish.publication import Publication
from rollbus.bus.publish.versions import VersionChain
from rollbus.schemas.errors import ControlCode, ControlError, LocalProtocolError
from rollbus.schemas.manifest import Link, Manifest, RankList, TensorEntry, content_digest
from tests.support.nats_server import opened
from tests.support.versions import opened_store, parts_in, publish, versions_bucket
from tests.support.waits import SOON_S, patient

ZERO = "0" * 64


def tensor(rank: int) -> TensorEntry:
    """Return the tensor of a rank, in a separate file."""
    return TensorEntry(name=f"t{rank}", dtype="U8", shape=(1,), sha256=ZERO, file=f"{rank}.safetensors")


def manifest_of(publication: Publication, tensors: list[TensorEntry]) -> Manifest:
    """Return the manifest of a version with only an anchor."""
    digest = content_digest(tensors, {})
    own = Link(objects=publication.objects, version=publication.version, digest=digest, anchor_bytes=1)
    return Manifest(
        model="m", version=publication.version, digest=digest, epoch=publication.epoch, publisher="alice",
        tensors=tuple(tensors), links=(own,),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def ranks(nats_url: str, count: int) -> AsyncIterator[tuple[Connection, str, list[VersionChain]]]:
    """Open this number of stores, of which the first has the lease. Yield the connection, the bucket and the stores."""
    async with opened(nats_url) as nats, versions_bucket(nats) as (fleet, bucket), contextlib.AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(opened_store(nats_url, fleet, with_lease=not rank)) for rank in range(count)
        ]
        yield nats, bucket, stores


@contextlib.asynccontextmanager
async def announced(
    nats_url: str, count: int
) -> AsyncIterator[tuple[Connection, str, list[VersionChain], Publication]]:
    """Open stores as `ranks` does, and announce version 7. Yield also its publication."""
    async with ranks(nats_url, count) as (nats, bucket, stores):
        publication = stores[0].begin(7)
        await publication.announce()
        yield nats, bucket, stores, publication


async def take_part(store: VersionChain, rank: int, version: int) -> None:
    """Publish as a rank other than 0."""
    publication = await store.join(version, SOON_S)
    await publication.put(f"{rank}.safetensors", [bytes([rank])])
    await publication.give(rank, [tensor(rank)])


async def test_several_ranks_publish_one_version(nats_url: str) -> None:
    """Each rank stores its objects and its list. Rank 0 commits all objects, and the lists are deleted."""
    async with ranks(nats_url, 3) as (nats, bucket, stores), asyncio.TaskGroup() as tasks:
        for rank in (1, 2):
            tasks.create_task(take_part(stores[rank], rank, 7))
        publication = stores[0].begin(7)
        await publication.announce()
        await publication.put("0.safetensors", [b"\0"])
        lists = await publication.collect(3, SOON_S)
        assert [(given.rank, given.tensors) for given in lists] == [(1, (tensor(1),)), (2, (tensor(2),))]
        await publication.commit(manifest_of(publication, [tensor(rank) for rank in range(3)]))

        async with ObjectReader(nats_url, name="test").open_folder(publication.objects) as folder:
            for rank in range(3):
                assert await folder.read(f"{rank}.safetensors", 1) == bytes([rank])
        assert await list_objects(nats, bucket, "ranks") == ()
        assert await parts_in(nats, bucket) == 4
        assert stores[0].record.opened is None


async def test_without_all_ranks_nothing_is_published(nats_url: str) -> None:
    """If ranks are missing, the error names them, the objects of all ranks are removed, and no rank can join."""
    async with announced(nats_url, 2) as (nats, bucket, stores, publication):
        await publication.put("0.safetensors", [b"\0"])
        await take_part(stores[1], 1, 7)
        with pytest.raises(ControlError, match=r"of 4 ranks, these .* s: 2 \(did not join\), 3 \(did") as raised:
            # A busy server must answer about rank 1 within this time.
            await publication.collect(4, patient(0.3))
        assert raised.value.code is ControlCode.TIMEOUT
        assert await parts_in(nats, bucket) == 0
        with pytest.raises(ControlError, match="rank 0 did not begin to publish version 7 within 0 s"):
            await stores[1].join(7, 0.0)
        await publish(stores[0], 7)


async def test_a_rank_stops_waiting_if_rank_0_discards_the_version(nats_url: str) -> None:
    """If rank 0 discards the version, other ranks stop waiting for its commit."""
    async with announced(nats_url, 2) as (_, _, stores, publication):
        await take_part(stores[1], 1, 7)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(refusal(stores[1].until_committed(publication.objects, SOON_S)))
            await publication.discard()
        assert waiting.result().code is ControlCode.NOT_FOUND
        assert "it failed, or another publisher took over" in waiting.result().message


async def test_a_rank_that_fails_ends_the_wait_of_rank_0(nats_url: str) -> None:
    """If a rank fails, rank 0 stops waiting for its list, and the errors of all ranks name the failed rank."""
    async with announced(nats_url, 3) as (nats, bucket, stores, publication):
        await publication.put("0.safetensors", [b"\0"])
        await take_part(stores[1], 1, 7)
        failing = await stores[2].join(7, SOON_S)
        await failing.put("2.safetensors", [b"\2"])
        await failing.fail(2, "OSError: no such weights")
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(refusal(stores[1].until_committed(publication.objects, SOON_S)))
            refused = await refusal(publication.collect(3, SOON_S))
        assert refused.code is ControlCode.BAD_SOURCE
        assert refused.message == "version 7 is not published: rank 2 failed: OSError: no such weights"
        assert waiting.result().code is ControlCode.NOT_FOUND
        assert waiting.result().message.endswith("rank 2 failed: OSError: no such weights")
        assert await parts_in(nats, bucket) == 0
        assert await list_objects(nats, bucket, "ranks") == ()
        await publish(stores[0], 8)


async def test_a_rank_that_dies_after_joining_is_named(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process of a rank dies after it joined, rank 0 stops waiting early and gives other ranks the reason."""
    monkeypatch.setattr(chain_store, "SILENT_S", 1.0)
    async with announced(nats_url, 3) as (nats, bucket, stores, publication):
        await take_part(stores[1], 1, 7)
        dying = await stores[2].join(7, SOON_S)
        async with dying.alive(2):
            await dying.put("2.safetensors", [b"\2"])
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(refusal(stores[1].until_committed(publication.objects, SOON_S)))
            refused = await refusal(publication.collect(3, SOON_S))
        said = "rank 2 joined, but has sent no sign of life for 1 s"
        assert (refused.code, refused.message) == (ControlCode.TIMEOUT, f"version 7 is not published: {said}")
        # Rank 1 may first detect that rank 0 is silent, because the lease is renewed less often than every second.
        assert waiting.result().code in {ControlCode.NOT_FOUND, ControlCode.TIMEOUT}
        assert await list_objects(nats, bucket, "ranks") == ()


async def test_a_rank_that_never_joins_is_named(nats_url: str) -> None:
    """After the timeout of rank 0, the error names the rank that never joined, separately from an unfinished rank."""
    async with announced(nats_url, 3) as (nats, bucket, stores, publication):
        joined = await stores[2].join(7, SOON_S)
        async with joined.alive(2):
            silences: dict[int, Any] = {}
            where = nats, bucket, publication._list_prefix
            assert [await chain_store.silence_of(*where, rank, silences) for rank in (1, 2)] == [None, None]
            assert set(silences) == {2}
            refused = await refusal(publication.collect(3, 1.0))
        assert refused.code is ControlCode.TIMEOUT
        assert "of 3 ranks, these stored no list within 1 s: 1 (did not join)" in refused.message


async def test_a_rank_does_not_wait_long_for_a_dead_rank_0(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 0 does not renew its lease, the error of rank 1 states that rank 0 sends no sign of life."""
    monkeypatch.setattr(chain_store, "SILENT_S", 1.0)
    monkeypatch.setattr(versions, "RENEW_S", 3600.0)
    async with announced(nats_url, 2) as (_, _, stores, publication):
        await take_part(stores[1], 1, 7)
        refused = await refusal(stores[1].until_committed(publication.objects, SOON_S))
        assert refused.code is ControlCode.TIMEOUT
        assert refused.message.endswith("rank 0 has sent no sign of life for 1 s")


async def test_cleaning_keeps_the_objects_of_ranks_for_an_open_version(nats_url: str) -> None:
    """Cleaning keeps the objects of ranks for an open version at any age.

    Rank 0 may still compare its tensors with them.
    """
    async with announced(nats_url, 2) as (nats, bucket, stores, publication):
        await take_part(stores[1], 1, 7)
        await stores[0].clean(set(), young_s=0.0)
        lists = await publication.collect(2, SOON_S)
        await publication.commit(manifest_of(publication, [tensor(1)]))
        assert len(lists) == 1
        assert await parts_in(nats, bucket) == 2


async def test_all_ranks_together_store_no_more_objects_than_a_folder_may_have(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks together may store no more objects than readers accept in a folder.

    Otherwise their objects are removed.
    """
    async with announced(nats_url, 2) as (nats, bucket, stores, publication):
        await publication.put("0.safetensors", [b"0"])
        await take_part(stores[1], 1, 7)
        monkeypatch.setattr(module, "MAX_FILES", 2)
        with pytest.raises(ControlError, match="raise the total to more than 2 with the manifest") as raised:
            await publication.collect(2, SOON_S)
        assert raised.value.code is ControlCode.BAD_SOURCE
        assert await parts_in(nats, bucket) == 0


async def refusal(waiting: Awaitable[object]) -> ControlError:
    """Return the error with which this call is rejected."""
    with pytest.raises(ControlError) as raised:
        await waiting
    return raised.value


async def test_a_rank_joins_its_own_version_only(nats_url: str) -> None:
    """A rank joins only the announced version of an open publisher, and cannot commit it."""
    async with announced(nats_url, 2) as (_, _, stores, publication):
        with pytest.raises(ControlError, match="rank 0 did not begin") as raised:
            await stores[1].join(8, 0.0)
        assert raised.value.code is ControlCode.TIMEOUT
        joined = await stores[1].join(7, 0.0)
        assert joined.objects == publication.objects
        with pytest.raises(LocalProtocolError, match="has no lease"):
            await joined.commit(manifest_of(joined, [tensor(1)]))
        with pytest.raises(LocalProtocolError, match="has no lease"):
            stores[1].begin(7)
        with pytest.raises(LocalProtocolError, match="has no lease"):
            await stores[1].note_recorded("b/versions/1")
        await stores[0].close()
        with pytest.raises(ControlError, match="rank 0 did not begin"):
            await stores[1].join(7, 0.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 8}, "it is of version 8, epoch 1, rank 1"),
        ({"epoch": 2}, "it is of version 7, epoch 2, rank 1"),
        ({"rank": 2}, "it is of version 7, epoch 1, rank 2"),
        ({"rank": "1"}, "the list of rank 1 is rejected: the list of a rank does not decode"),
    ],
)
async def test_a_list_of_another_version_epoch_or_rank_is_refused(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], said: str
) -> None:
    """Rank 0 rejects a damaged list and one of another version, epoch or rank, and nothing is published."""
    monkeypatch.setattr(module, "RankList", lambda **fields: RankList(**(fields | change)))
    async with announced(nats_url, 2) as (nats, bucket, stores, publication):
        await take_part(stores[1], 1, 7)
        with pytest.raises(ControlError, match=said) as raised:
            await publication.collect(2, SOON_S)
        assert raised.value.code is ControlCode.BAD_SOURCE
        await stores[0].clean(set(), young_s=0.0)
        assert await parts_in(nats, bucket) == 0


@pytest.mark.parametrize("name", ["versions/chain", "../x", "m/weights/1-abc/a"])
async def test_a_rank_cannot_name_objects_of_others(nats_url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rank 0 rejects a list with an object outside the folder of the version."""
    real = chain_store.as_rank_object
    monkeypatch.setattr(module, "as_rank_object", lambda info: msgspec.structs.replace(real(info), name=name))
    async with announced(nats_url, 2) as (_, _, stores, publication):
        await take_part(stores[1], 1, 7)
        with pytest.raises(ControlError) as raised:
            await publication.collect(2, SOON_S)
        assert raised.value.code is ControlCode.BAD_SOURCE


async def test_the_error_of_a_lost_lease_names_the_new_publisher(nats_url: str) -> None:
    """`announce` requires the lease. The error names the publisher that took it over."""
    async with ranks(nats_url, 1) as (nats, bucket, stores):
        publication = stores[0].begin(7)
        key = ChainKey(nats, bucket.removeprefix("rollbus-").rpartition("-")[0], "m")
        stored = await key.read()
        other = msgspec.structs.replace(stored.record.holder, publisher="bob", incarnation="x")
        assert await key.write(msgspec.structs.replace(stored.record, epoch=2, holder=other), stored.sequence)
        with pytest.raises(ControlError, match="bob took over") as raised:
            await publication.announce()
        assert raised.value.code is ControlCode.PUBLISHER_BUSY
