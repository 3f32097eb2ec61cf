"""Users and published weights: only a publisher of the model may publish its weights.

Forged or hostile versions do not affect a worker.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import rollbus
from rollbus.bus.auth.credentials import Signatures
from rollbus.bus.nats.connection import publish_permitted
from rollbus.bus.nats.jetstream import put
from rollbus.bus.objects.catalog import list_subjects
from rollbus.bus.objects.layout import ObjectInfo, info_subject, parts_subject
from rollbus.bus.objects.reader import ObjectReader
from rollbus.bus.publish.chain_store import read_chain
from rollbus.bus.publish.versions import VersionChain
from rollbus.bus.subjects import Subjects, published_bucket
from rollbus.schemas.errors import ControlCode, ControlError, PermissionDenied
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
from tests.control.support import ask
from tests.support.checkpoints import MODEL as SHAPES
from tests.support.checkpoints import write_adapter, write_checkpoint
from tests.support.fleet import until_worker
from tests.support.objects import files_in, stored_messages
from tests.support.requests import incomplete
from tests.support.versions import Versions, folder_content, parts_in, publish, random_weights
from tests.support.waits import SOON_S

pytestmark = pytest.mark.slow


BUCKET = published_bucket(FLEET, MODEL)
FOLDER = "versions/7-1-0123abcd"
"""Folder of a version that no client has published."""
HUGE = 2**60


@pytest.mark.parametrize("name", ["alice", "w0", "front", "eye", "dave"])
async def test_only_a_publisher_of_the_model_may_store_objects(name: str, tmp_path: Path) -> None:
    """Only a publisher of the model may store object parts, a manifest or a chain.

    A publisher of another model may not.
    """
    subjects = [info_subject(BUCKET, f"{FOLDER}/{file}") for file in (MANIFEST, "delta-0000", "model.safetensors")]
    subjects += [info_subject(BUCKET, "versions/chain"), parts_subject(BUCKET, "x")]
    subjects += [f"$JS.API.STREAM.PURGE.OBJ_{BUCKET}", f"$JS.API.STREAM.DELETE.OBJ_{BUCKET}"]
    async with guarded(tmp_path) as guard, guard.connected("boss") as boss:
        await publish_permitted(boss, parts_subject(BUCKET, "y"), b"stays")
        for subject in subjects:
            async with guard.connected(name) as nats:
                with pytest.raises(PermissionDenied):
                    await publish_permitted(nats, subject, b"{}")
        assert await stored_messages(boss, BUCKET) == 1


class Scene:
    """A worker with version 1, an anchor that the test has published with the key of the model's publisher."""

    def __init__(self, guard: Guarded, carol: rollbus.Client, folder: Path) -> None:
        self.first, self.second = random_weights(1), random_weights(1)
        self.second["model.embed_tokens.weight"][::40] += 1
        self._guard = guard
        self._carol = carol
        self._folder = folder

    async def publish(self, *, by: str | None = "carol", **changes: Any) -> str:
        """Store an anchor of the first weights and a delta to it, and return the delta's folder.

        Args:
            by: the user that signs the delta; None leaves it unsigned.
            changes: changes of the delta, as for `Versions.publish`.
        """
        async with self._guard.connected("boss") as nats:
            versions = Versions(nats, BUCKET, self._folder / "stored")
            nats.signatures = Signatures(self._guard.credentials("carol"))
            await versions.publish(self.first)
            nats.signatures = Signatures(None if by is None else self._guard.credentials(by))
            source = await versions.publish(self.second, **changes)
        return str(source.objects)

    async def anchor(self) -> str:
        """Store an anchor of the first weights and return its folder."""
        async with self._guard.connected("boss") as nats:
            nats.signatures = Signatures(self._guard.credentials("carol"))
            return str((await Versions(nats, BUCKET, self._folder / "stored").publish(self.first)).objects)

    async def update(self, objects: str, version: int = 2) -> rollbus.CommandResult:
        """Let the worker load a version."""
        return await self._carol.fleet.update_weights(objects=objects, version=version, model=MODEL)

    async def check_refused(self, objects: str) -> str:
        """Check that the worker rejects the folder as `bad_source` and keeps its weights; return its reason."""
        error = await incomplete(self.update(objects))
        [ack] = error.ledger.failed.values()
        assert ack.error.code is ControlCode.BAD_SOURCE
        generation = await self._carol.complete(ask())
        assert {*generation.weight_versions.tolist()} == {1}
        assert self.contents() == [folder_content(self.first)]
        return ack.error.message

    def contents(self) -> list[dict[str, bytes]]:
        """Return the contents of the complete folders in the machine's cache."""
        return [
            files_in(folder)
            for folder in (self._folder / "cache" / FLEET / "shared.weights" / "checkpoints").glob("[!.]*")
        ]


@contextlib.asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    """Run a worker and load version 1."""
    own = write_checkpoint(folder / "own", dtype="BF16")
    async with guarded(folder / "auth") as guard:
        worker = guard.worker(model_path=str(own), cache_dir=str(folder / "cache"))
        async with worker, rollbus.connect(guard.login("carol")) as carol:
            await carol.fleet.wait_for_workers()
            found = Scene(guard, carol, folder)
            await found.update(await found.anchor(), 1)
            yield found


@pytest.mark.parametrize("author", [None, "dave", "w0"])
async def test_a_version_that_its_publisher_did_not_sign_is_refused(author: str | None, tmp_path: Path) -> None:
    """A worker ignores a version that is unsigned, or signed by a publisher of another model or by a worker."""
    async with scene(tmp_path) as it:
        assert "no signed objects" in await it.check_refused(await it.publish(by=author))
        await it.update(await it.publish())
        assert folder_content(it.second) in it.contents()


async def stored_names(guard: Guarded) -> list[str]:
    """Return the subjects of all stored objects of the model."""
    async with guard.connected("boss") as boss:
        return sorted(await list_subjects(boss, BUCKET, "$O.>"))


ELSEWHERE = {"version": 0, "digest": "0" * 64, "anchor_bytes": 1}
HOSTILE: tuple[dict[str, Any], ...] = (
    {"change": {"offset": HUGE}},
    {"change": {"num_bytes": HUGE}},
    {"change": {"num_bytes": 1}},
    {"change": {"body_bytes": HUGE}},
    {"change": {"num_changed": HUGE}},
    {"change": {"num_changed": 3}},
    {"change": {"object": 7}},
    {"change": {"encoding": "other"}},
    {"files": {"delta-0000": None}},
    {"files": {"delta-0000": b""}},
    {"files": {"delta-0000": b"\x28\xb5\x2f\xfd" * 100}},
    {"files": {MANIFEST: b"{" * 100_000}},
    {"files": {MANIFEST: b"[" * 100_000}},
    {"files": {MANIFEST: b"\xff"}},
    {"manifest": {"model": ""}},
    {"manifest": {"tensors": []}},
    {"manifest": {"digest": "0" * 64}},
    {"manifest": {"links": []}},
    {"manifest": {"links": [{"objects": f"{BUCKET}/versions/1-1-00000000", **ELSEWHERE}]}},
    {"manifest": {"files": {"../config.json": "0" * 64}}},
    {"manifest": {"v": 2}},
)
"""Changes to a version that a hostile publisher makes."""


async def test_a_worker_rejects_an_invalid_version_of_its_publisher(tmp_path: Path) -> None:
    """A worker rejects an invalid version that the model's publisher signed, and loads a valid version after it."""
    async with scene(tmp_path) as it:
        for hostile in HOSTILE:
            assert await it.check_refused(await it.publish(**hostile)), hostile
        await it.update(await it.publish())
        assert folder_content(it.second) in it.contents()


async def test_workers_that_require_signatures_load_anchor_deltas_and_adapter(tmp_path: Path) -> None:
    """Server and workers accept an anchor, deltas and an adapter from the publisher of the model.

    Only a user that may send `load_lora`, such as an admin, can load the adapter. A publisher may not.
    """
    own = write_checkpoint(tmp_path / "own")
    tensors = {name: np.full(shape, 2, np.float32) for name, shape in SHAPES.items()}
    async with contextlib.AsyncExitStack() as stack:
        guard = await stack.enter_async_context(guarded(tmp_path / "auth"))

        async def start(name: str) -> None:
            worker = guard.worker(name, model_path=str(own), cache_dir=str(tmp_path / name))
            await stack.enter_async_context(worker)

        await start("w0")
        carol = await stack.enter_async_context(rollbus.connect(guard.login("carol")))
        await carol.fleet.wait_for_workers()
        publisher = await stack.enter_async_context(rollbus.WeightPublisher(carol, model=MODEL, checkpoint=own))
        published, heard = [], []
        for version in range(1, 5):
            tensors["model.norm.weight"][version % 4] += 1
            published.append(await publisher.publish(tensors, version=version))
            heard.append({*(await carol.complete(ask())).weight_versions.tolist()})
        folder = write_adapter(tmp_path / "tuned")
        # The publisher's client rejects the adapter before the first byte, so the upload is not wasted.
        before = await stored_names(guard)
        with pytest.raises(rollbus.ControlError, match=r"may not send load_lora.* update=False stores"):
            await publisher.publish_adapter("tuned", [], version=7, config={})
        assert await stored_names(guard) == before
        adapter = await publisher.publish_adapter("tuned", folder, version=7, update=False)
        with pytest.raises(rollbus.ControlError, match="publisher carol may not send load_lora"):
            await carol.fleet.load_lora("tuned", objects=adapter.objects, version=7)
        boss = await stack.enter_async_context(rollbus.connect(guard.login("boss")))
        await boss.fleet.load_lora("tuned", objects=adapter.objects, version=7, model=MODEL)
        tuned = await carol.complete(ask(lora="tuned"))
        await start("w1")
        await carol.fleet.wait_for_workers(2)
        late = await until_worker(carol, "w1", lambda worker: worker.loras)
        violations = guard.violations()

    assert [each.is_anchor for each in published] == [True, False, False, False]
    assert all(each.ledger is not None and each.ledger.is_complete for each in published)
    assert heard == [{1}, {2}, {3}, {4}]
    assert {*tuned.lora_versions.tolist()} == {7}
    assert (late.weight_version, late.loras[0].version) == (4, 7)
    assert violations == []


# Published versions with roles: only publishers can publish, and workers can fetch.


def store_of(guard: Guarded, name: str) -> VersionChain:
    """Return a version store with the credentials of a user."""
    return VersionChain(guard.login(name), Subjects(FLEET), MODEL, publisher=name)


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
