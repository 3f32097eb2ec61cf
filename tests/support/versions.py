"""Version stores and small published versions for tests."""

import contextlib
import hashlib
import math
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.bus.objects.catalog import ensure_bucket, list_objects, list_subjects
from rollbus.bus.objects.writer import put_folder
from rollbus.bus.protocol.weights.chain import links_with
from rollbus.bus.protocol.weights.tensors import encode_delta, layouts
from rollbus.bus.publish.publication import Publication
from rollbus.bus.publish.versions import VersionChain
from rollbus.bus.subjects import Subjects, published_bucket
from rollbus.schemas.manifest import (
    CHAIN_OBJECT,
    MANIFEST,
    Link,
    Manifest,
    TensorDelta,
    TensorEntry,
    content_digest,
    delta_name,
)
from rollbus.schemas.weights import WeightSource
from tests.support.checkpoints import MODEL as SHAPES
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


def fresh_store(server: str | Server, fleet: str, *, publisher: str = "alice") -> VersionChain:
    """Return a store that is not open."""
    return VersionChain(server, Subjects(fleet), MODEL, publisher=publisher)


@contextlib.asynccontextmanager
async def opened_store(
    server: str | Server, fleet: str, *, publisher: str = "alice", with_lease: bool = True
) -> AsyncIterator[VersionChain]:
    """Open a store for the duration of the block."""
    store = fresh_store(server, fleet, publisher=publisher)
    await store.open(with_lease=with_lease)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def store_with_bucket(nats_url: str) -> AsyncIterator[tuple[Connection, str, VersionChain]]:
    """Make a bucket, and open a store for the duration of the block. Yield a connection, the bucket and the store."""
    async with (
        opened(nats_url) as nats,
        versions_bucket(nats) as (fleet, bucket),
        opened_store(nats_url, fleet) as store,
    ):
        yield nats, bucket, store


def manifest_of(
    store: VersionChain,
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
    store: VersionChain,
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


# Published weight versions that tests write directly into a bucket, as chains and with all kinds of damage.

Weights = dict[str, npt.NDArray[np.uint8]]

# The tensors are those of `tests.support.checkpoints`, in BF16.
CONFIG = b'{"model_type": "none", "rope_theta": 10000.0}'
FILE = "model.safetensors"


def random_weights(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Weights:
    """Make random bytes for all tensors."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 256, math.prod(shape) * 2, np.uint8) for name, shape in shapes.items()}


def folder_content(weights: Weights, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, bytes]:
    """Return the files in a folder of these weights."""
    [layout] = layouts(_entries(weights, shapes))
    content = b"".join(weights[entry.name].tobytes() for entry in layout.entries)
    return {FILE: layout.header + content, "config.json": CONFIG}


class Versions:
    """Writes a chain of versions, one after the other, into a bucket."""

    def __init__(
        self, nats: Connection, bucket: str, tmp_path: Path, shapes: Mapping[str, tuple[int, ...]] = SHAPES
    ) -> None:
        self.nats = nats
        self.bucket = bucket
        self.links: tuple[Link, ...] = ()
        self._tmp_path = tmp_path
        self._shapes = shapes
        self._weights: Weights = {}

    def source(self, number: int = -1) -> WeightSource:
        """Return the source of a version."""
        return WeightSource(objects=self.links[number].objects)

    async def publish(
        self,
        weights: Weights,
        *,
        is_anchor: bool = False,
        is_delta: bool = True,
        manifest: Mapping[str, Any] | None = None,
        change: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes | None] | None = None,
    ) -> WeightSource:
        """Store a version.

        Args:
            is_anchor: store an anchor; the first version always has one.
            is_delta: store a delta, unless this is the first version.
            manifest: JSON fields that replace fields of the manifest; the digest is not updated.
            change: fields that replace fields of each tensor's delta.
            files: additional objects, or replaced contents of objects; None omits an object.
        """
        folder = self._tmp_path / f"version-{uuid.uuid4().hex}"
        folder.mkdir(parents=True)
        objects: dict[str, bytes] = {}
        entries = _entries(weights, self._shapes)
        has_delta = is_delta and bool(self.links)
        if has_delta:
            entries, objects = self._add_deltas(entries, weights)
        delta_bytes = sum(map(len, objects.values())) if has_delta else None
        anchor = folder_content(weights, self._shapes) if is_anchor or not self.links else {}
        link = Link(
            objects=f"{self.bucket}/versions/{len(self.links)}-1-{uuid.uuid4().hex[:8]}",
            version=len(self.links),
            digest=content_digest(entries, {"config.json": hashlib.sha256(CONFIG).hexdigest()}),
            delta_bytes=delta_bytes,
            anchor_bytes=sum(map(len, anchor.values())) or None,
        )
        links = (*self.links, link) if has_delta else (link,)
        made = msgspec.to_builtins(_manifest(entries, links)) | dict(manifest or {})
        for tensor in made["tensors"]:
            if "delta" in tensor:
                tensor["delta"] |= dict(change or {})
        objects |= anchor | {MANIFEST: msgspec.json.encode(made)}
        for name, content in {**objects, **(files or {})}.items():
            if content is not None:
                (folder / name).write_bytes(content)
        await put_folder(self.nats, self.bucket, link.objects.partition("/")[2], folder, max_bytes=BUCKET_BYTES)
        self.links, self._weights = links, weights
        return self.source()

    def _add_deltas(
        self, entries: tuple[TensorEntry, ...], weights: Weights
    ) -> tuple[tuple[TensorEntry, ...], dict[str, bytes]]:
        data = b""
        changed = []
        for entry in entries:
            encoded = encode_delta(self._weights[entry.name], weights[entry.name], entry.item_bytes)
            delta = None
            if encoded.encoding != "same":
                delta = TensorDelta(
                    encoding=encoded.encoding,
                    offset=len(data),
                    num_bytes=len(encoded.data),
                    body_bytes=encoded.body_bytes,
                    num_changed=encoded.num_changed,
                )
                data += encoded.data
            changed.append(msgspec.structs.replace(entry, delta=delta))
        return tuple(changed), {delta_name(0): data} if data else {}


def _entries(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(
            name=name,
            dtype="BF16",
            shape=shape,
            sha256=hashlib.sha256(weights[name].tobytes()).hexdigest(),
            file=FILE,
        )
        for name, shape in shapes.items()
    )


def _manifest(entries: tuple[TensorEntry, ...], links: tuple[Link, ...]) -> Manifest:
    return Manifest(
        model="m",
        version=links[-1].version,
        digest=links[-1].digest,
        epoch=1,
        publisher="test",
        tensors=entries,
        files={"config.json": hashlib.sha256(CONFIG).hexdigest()},
        links=links,
    )
