"""Version stores and small published versions for tests."""

import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator

from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.bus.objects.catalog import ensure_bucket, list_objects, list_subjects
from rollbus.bus.protocol.weights.chain import links_with
from rollbus.bus.publish.publication import Publication
from rollbus.bus.publish.versions import VersionStore
from rollbus.bus.subjects import Subjects, published_bucket
from rollbus.schemas.manifest import CHAIN_OBJECT, Link, Manifest, TensorEntry, content_digest
from tests.support.nats_server import opened

BUCKET_BYTES = 24 * 1024**2
MODEL = "m"


@contextlib.asynccontextmanager
async def versions_bucket(nats: Connection, *, max_bytes: int = BUCKET_BYTES) -> AsyncIterator[tuple[str, str]]:
    """Make a fleet name and a bucket for the model `m`; delete the bucket at the end of the block."""
    fleet = f"versions-{uuid.uuid4().hex[:8]}"
    bucket = published_bucket(fleet, MODEL)
    await ensure_bucket(nats, bucket, max_bytes=max_bytes)
    try:
        yield fleet, bucket
    finally:
        await ask(nats, f"STREAM.DELETE.OBJ_{bucket}")


def fresh_store(server: str | Server, fleet: str, *, publisher: str = "alice") -> VersionStore:
    """Return a store that is not open."""
    return VersionStore(server, Subjects(fleet), MODEL, publisher=publisher)


@contextlib.asynccontextmanager
async def opened_store(
    server: str | Server, fleet: str, *, publisher: str = "alice", with_lease: bool = True
) -> AsyncIterator[VersionStore]:
    """Open a store for the duration of the block."""
    store = fresh_store(server, fleet, publisher=publisher)
    await store.open(with_lease=with_lease)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def store_with_bucket(nats_url: str) -> AsyncIterator[tuple[Connection, str, VersionStore]]:
    """Make a bucket, and open a store for the duration of the block. Yield a connection, the bucket and the store."""
    async with (
        opened(nats_url) as nats,
        versions_bucket(nats) as (fleet, bucket),
        opened_store(nats_url, fleet) as store,
    ):
        yield nats, bucket, store


def manifest_of(
    store: VersionStore,
    publication: Publication,
    content: bytes,
    *,
    delta: bool = False,
    adapter: str | None = None,
    publisher: str = "alice",
) -> Manifest:
    """Return the manifest of a version with one tensor."""
    tensor = TensorEntry(
        name="t", dtype="U8", shape=(len(content),), sha256=hashlib.sha256(content).hexdigest(), file="a.safetensors"
    )
    digest = content_digest([tensor], {})
    own = Link(
        objects=publication.objects,
        version=publication.version,
        digest=digest,
        delta_bytes=len(content) if delta else None,
        anchor_bytes=None if delta else len(content),
    )
    return Manifest(
        model=MODEL,
        adapter=adapter,
        version=publication.version,
        digest=digest,
        epoch=publication.epoch,
        publisher=publisher,
        tensors=(tensor,),
        links=(own,) if adapter else links_with(store.record.links, own),
    )


async def publish(
    store: VersionStore,
    version: int,
    *,
    content: bytes | None = None,
    delta: bool = False,
    adapter: str | None = None,
    publisher: str = "alice",
) -> str:
    """Publish a small version; return its folder."""
    content = content or f"content {version}".encode()
    publication = store.begin(version, adapter)
    await publication.put("delta-0000" if delta else "a.safetensors", [content])
    await publication.commit(
        manifest_of(store, publication, content, delta=delta, adapter=adapter, publisher=publisher)
    )
    return publication.objects


async def parts_in(nats: Connection, bucket: str) -> int:
    """Return the number of objects with chunks in the bucket."""
    return len(await list_subjects(nats, bucket, f"$O.{bucket}.C.>"))


async def folders_in(nats: Connection, bucket: str) -> set[str]:
    """Return the folders of versions in the bucket."""
    names = [info.name for info in await list_objects(nats, bucket) if info.name != CHAIN_OBJECT]
    return {f"{bucket}/{name.rpartition('/')[0]}" for name in names}
