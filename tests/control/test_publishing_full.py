"""Publishing into a full bucket, in each way: the bucket is cleaned first, then the publication is rejected."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus.bus.nats.connection import connected
from rollbus.bus.objects.catalog import ensure_bucket
from rollbus.bus.publish import version_publisher
from rollbus.bus.subjects import published_bucket
from rollbus.schemas.errors import ControlCode, ControlError
from tests.control.support import MODEL
from tests.control.test_publishing import folders

MEGABYTE = 1024**2
BUCKET_BYTES = 7 * MEGABYTE
"""The size of a bucket that fits two versions of a megabyte and the space that is reserved for the record."""


@contextlib.asynccontextmanager
async def small_bucket(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[rollbus.Client]:
    """Yield a client and a small bucket from which all unused objects may be removed immediately."""
    monkeypatch.setattr(version_publisher, "PRESSED_S", 0.0)
    async with connected(nats_url, name="test") as nats:
        await ensure_bucket(nats, published_bucket(fleet, MODEL), max_bytes=BUCKET_BYTES)
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        yield rb


def tensors(version: int, size: int = MEGABYTE) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a version."""
    return {"a": np.full(size, version, np.uint8)}


async def test_a_full_bucket_is_cleaned_before_a_version_is_refused(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two unused versions fit into the bucket, and publishing can continue without limit."""
    async with small_bucket(nats_url, fleet, monkeypatch) as rb:
        for version in range(1, 6):
            # A new publisher each time, so that each version is an anchor.
            async with rollbus.WeightPublisher(rb, model=MODEL) as publisher:
                await publisher.publish(tensors(version), version=2 * version, update=False)
                again = await publisher.publish(tensors(version), version=2 * version + 1, update=False)
                assert not again.is_anchor
    assert len(await folders(nats_url, fleet)) < 10


async def publish_adapters(publisher: rollbus.WeightPublisher) -> None:
    """Publish adapters only, so that no version of the weights is planned."""
    for version in range(1, 6):
        await publisher.publish_adapter("a", tensors(version), version=version, config={}, update=False)


async def publish_first_after_adapters(publisher: rollbus.WeightPublisher) -> None:
    """Publish a first version from an iterator, whose size is unknown before it is drawn."""
    for version in (1, 2):
        await publisher.publish_adapter("a", tensors(version), version=version, config={}, update=False)
    published = await publisher.publish(iter(tensors(3).items()), version=3, update=False)
    assert published.is_anchor


@pytest.mark.parametrize("publish", [publish_adapters, publish_first_after_adapters])
async def test_an_unplanned_publication_removes_older_adapters_from_a_full_bucket(
    nats_url: str,
    fleet: str,
    monkeypatch: pytest.MonkeyPatch,
    publish: Callable[[rollbus.WeightPublisher], Awaitable[None]],
) -> None:
    """If the bucket becomes full while an unplanned publication is stored, the older adapters are removed."""
    async with (
        small_bucket(nats_url, fleet, monkeypatch) as rb,
        rollbus.WeightPublisher(rb, model=MODEL) as publisher,
    ):
        await publish(publisher)


async def test_a_first_version_that_cannot_fit_is_refused_before_its_first_byte(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first version that is too large is rejected before its first byte, if its tensors are given all at once.

    With an iterator it is rejected when the bucket is full. In both cases nothing remains in the bucket.
    """
    async with (
        small_bucket(nats_url, fleet, monkeypatch) as rb,
        rollbus.WeightPublisher(rb, model=MODEL) as publisher,
    ):
        for large, said in (
            (tensors(1, 4 * MEGABYTE), "an anchor \\(first\\) takes"),
            (iter(tensors(1, 4 * MEGABYTE).items()), "has no room"),
        ):
            with pytest.raises(ControlError, match=said) as raised:
                await publisher.publish(large, version=1, update=False)
            assert raised.value.code is ControlCode.STORAGE
        assert (await publisher.publish(tensors(1), version=1, update=False)).is_anchor
