"""Publishing into a bucket that is full, in each way: it is cleaned first, and refused if that does not help."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus.bus.client.weights import fleet_loader
from rollbus.bus.nats.connection import connected
from rollbus.bus.objects.catalog import ensure_bucket
from rollbus.bus.subjects import published_bucket
from rollbus.schemas.errors import ControlCode, ControlError
from tests.control.support import MODEL
from tests.control.test_publishing import folders

pytestmark = pytest.mark.slow

MEGABYTE = 1024**2
BUCKET_BYTES = 7 * MEGABYTE
"""With what is spared for the record: two versions of a megabyte."""


@contextlib.asynccontextmanager
async def small_bucket(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[rollbus.Client]:
    """A client, and a bucket of which all may go at once that nobody needs."""
    monkeypatch.setattr(fleet_loader, "PRESSED_S", 0.0)
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
    """Of versions that nobody needs two fit; publishing goes on for as many as one likes."""
    async with small_bucket(nats_url, fleet, monkeypatch) as rb:
        for version in range(1, 6):
            # A new publisher each time, so that each version is an anchor.
            async with rollbus.WeightPublisher(rb, model=MODEL) as publisher:
                await publisher.publish(tensors(version), version=2 * version, update=False)
                again = await publisher.publish(tensors(version), version=2 * version + 1, update=False)
                assert not again.is_anchor
    assert len(await folders(nats_url, fleet)) < 10


async def publish_adapters(publisher: rollbus.WeightPublisher) -> None:
    """Adapters alone: no version of the weights is ever planned."""
    for version in range(1, 6):
        await publisher.publish_adapter("a", tensors(version), version=version, config={}, update=False)


async def publish_first_after_adapters(publisher: rollbus.WeightPublisher) -> None:
    """A first version out of an iterator: what it takes is not known before it is drawn."""
    for version in (1, 2):
        await publisher.publish_adapter("a", tensors(version), version=version, config={}, update=False)
    published = await publisher.publish(iter(tensors(3).items()), version=3, update=False)
    assert published.is_anchor


@pytest.mark.parametrize("publish", [publish_adapters, publish_first_after_adapters])
async def test_what_is_not_planned_has_the_bucket_cleaned_when_it_is_full(
    nats_url: str,
    fleet: str,
    monkeypatch: pytest.MonkeyPatch,
    publish: Callable[[rollbus.WeightPublisher], Awaitable[None]],
) -> None:
    """While it is stored: nobody needs the adapters of before."""
    async with (
        small_bucket(nats_url, fleet, monkeypatch) as rb,
        rollbus.WeightPublisher(rb, model=MODEL) as publisher,
    ):
        await publish(publisher)


async def test_a_first_version_that_cannot_fit_is_refused_before_its_first_byte(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its tensors are given all at once; of an iterator it is known when the bucket is full. Nothing stays."""
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
