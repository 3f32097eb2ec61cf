"""Weights that a trainer publishes, on a real server and real workers: stored, loaded and rejected."""

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus.bus.nats.connection import connected
from rollbus.bus.objects.catalog import ensure_bucket, list_prefix
from rollbus.bus.publish import version_publisher
from rollbus.bus.publish.chain_store import ChainKey
from rollbus.bus.subjects import published_bucket
from rollbus.schemas.errors import ControlCode, ControlError, InvalidRequest
from rollbus.schemas.manifest import ChainRecord
from tests.control.support import MODEL, SHAPE, TENSORS, ask, serving_here, start_here, write_adapter, write_checkpoint
from tests.support.waits import SOON_S

Arrays = dict[str, np.ndarray[Any, Any]]


def weights(seed: int) -> Arrays:
    """Return the tensors of `write_checkpoint` with this seed."""
    numbers = np.random.default_rng(seed)
    return {name: numbers.random(SHAPE, np.float32) for name in TENSORS.values()}


def stepped(tensors: Arrays) -> Arrays:
    """Return a copy with one changed number in each tensor."""
    tensors = {name: tensor.copy() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor[3, 1] += 1
    return tensors


async def names(nats_url: str, objects: str) -> list[str]:
    """Return the objects of a folder."""
    async with connected(nats_url, name="test") as nats:
        infos = await list_prefix(nats, objects, is_signed=False)
    return sorted(info.name.rpartition("/")[2] for info in infos)


async def folders(nats_url: str, fleet: str) -> list[str]:
    """Return the folders of the versions that the chain record names."""
    async with connected(nats_url, name="test") as nats:
        record = (await ChainKey(nats, fleet, MODEL).read()).record
    return [link.objects for link in record.links]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors | {"other": np.ones(1)}, r"named_tensors\['other'\] is an unexpected tensor"),
        (lambda tensors: dict(list(tensors.items())[:1]), r"named_tensors\['.*'\] is missing"),
        (lambda tensors: tensors | dict.fromkeys(list(tensors)[1:], np.ones(3)), r"is F64\[3\]; allowed: F32\[8, 4\]"),
        (lambda tensors: [*tensors.items(), 7], "named_tensors has 7; allowed: pairs"),
    ],
)
async def test_a_publication_with_wrong_tensors_stores_nothing(
    nats_url: str, fleet: str, change: Any, message: str
) -> None:
    """A publication with wrong tensors stores nothing. The next one is compared with the committed version."""
    async with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        first = await publisher.publish(weights(1), version=1, update=False)
        with pytest.raises(InvalidRequest, match=message):
            await publisher.publish(change(stepped(weights(1))), version=2, update=False)
        assert await folders(nats_url, fleet) == [first.objects]
        async with connected(nats_url, name="test") as nats:
            assert len(await list_prefix(nats, published_bucket(fleet, MODEL) + "/versions", is_signed=False)) == 3
        second = await publisher.publish(stepped(weights(1)), version=2, update=False)
    assert (second.is_anchor, second.num_changed) == (False, 2)


async def test_a_cancelled_publication_stores_nothing(nats_url: str, fleet: str) -> None:
    """A cancelled publication stores nothing, and the publisher's next publication works."""
    is_drawn, goes_on = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, object]]:
        for item in weights(1).items():
            yield item
            is_drawn.set()
            goes_on.wait()

    async with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        publishing = asyncio.ensure_future(publisher.publish(slow(), version=1, update=False))  # noqa: TID251
        await asyncio.to_thread(is_drawn.wait)
        publishing.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert await folders(nats_url, fleet) == []
        assert (await publisher.publish(weights(1), version=1, update=False)).is_anchor


async def test_an_impossible_publication_is_rejected_before_data_is_stored(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """`publish` rejects a `min_staged` above the number of workers and an impossible canary before it stores data."""
    one = write_checkpoint(tmp_path / "one", seed=1)
    canary = rollbus.Canary(token_ids=(1,), logprobs=(0.0,))
    async with serving_here(nats_url, fleet, one, 1) as rb, rollbus.WeightPublisher(rb, model=MODEL) as publisher:
        with pytest.raises(InvalidRequest, match="min_staged"):
            await publisher.publish(weights(2), version=2, min_staged=2)
        with pytest.raises(InvalidRequest, match="expected_canary"):
            await publisher.publish(weights(2), version=2, expected_canary=canary)
        assert await folders(nats_url, fleet) == []


async def test_the_chain_record_notes_the_desired_version(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The chain record notes a version in the desired state, also if an admin, not the publisher, had it loaded."""
    one = write_checkpoint(tmp_path / "one", seed=1)
    async with (
        serving_here(nats_url, fleet, one, 1) as rb,
        rollbus.WeightPublisher(rb, model=MODEL, checkpoint=one) as publisher,
        connected(nats_url, name="test") as nats,
    ):
        key = ChainKey(nats, fleet, MODEL)
        first = await publisher.publish(weights(2), version=2, update=False)
        assert (await key.read()).record.noted == ()
        await rb.fleet.update_weights(objects=first.objects, version=2)
        await publisher.publish_adapter("other", write_adapter(tmp_path / "adapter"), version=1, update=False)
        assert (await key.read()).record.noted == (first.objects,)


async def test_the_fleet_serves_the_published_weights(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Workers load an anchor and then a delta, and tokens have the version. A late worker loads it by itself."""
    one = write_checkpoint(tmp_path / "one", seed=1)
    two = stepped(weights(2))
    async with serving_here(nats_url, fleet, one, 2) as rb:
        async with rollbus.WeightPublisher(rb, model=MODEL, checkpoint=one) as publisher:
            first = await publisher.publish(weights(2), version=2)
            acks = []
            second = await publisher.publish(two, version=3, on_ack=lambda ack: acks.append(ack.worker))
            with pytest.raises(ControlError, match="version 3 is recorded already"):
                await publisher.publish(two, version=3)
        after = await rb.complete(ask())
        async with start_here(nats_url, fleet, "w9", one):
            await rb.fleet.wait_for_workers(3)
            assert {worker.weight_version for worker in (await rb.fleet.state()).workers} == {3}
    assert first.is_anchor
    assert not second.is_anchor
    assert second.ledger.is_complete
    assert set(acks) == {"w0", "w1"}
    assert set(after.weight_versions.tolist()) == {3}


async def test_after_a_transfer_the_next_version_is_an_anchor(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Weights of an engine transfer end the chain: the next version is an anchor, and then a delta."""
    one, other = write_checkpoint(tmp_path / "one", seed=1), write_checkpoint(tmp_path / "other", seed=9)
    info = {"data": base64.b64encode((other / next(iter(TENSORS))).read_bytes()).decode()}
    tensors = [weights(2)]
    for _ in range(3):
        tensors.append(stepped(tensors[-1]))
    async with serving_here(nats_url, fleet, one, 1) as rb:
        async with rollbus.WeightPublisher(rb, model=MODEL, checkpoint=one) as publisher:
            before = [await publisher.publish(tensors[i], version=i + 2) for i in range(2)]
            await rb.fleet.init_weight_transfer({})
            await rb.fleet.start_weight_update()
            await rb.fleet.update_weight_chunk(info)
            await rb.fleet.finish_weight_update(4)
            transferred = await rb.complete(ask())
            after = [await publisher.publish(tensors[i], version=i + 3) for i in (2, 3)]
        generation = await rb.complete(ask())
    assert [published.is_anchor for published in (*before, *after)] == [True, False, True, False]
    assert await names(nats_url, after[0].objects) == ["config.json", "model.safetensors", "rollbus-manifest.json"]
    assert set(transferred.weight_versions.tolist()) == {4}
    assert set(generation.weight_versions.tolist()) == {6}


async def test_adapters_are_published_whole(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An adapter comes from a folder, or from tensors and a configuration. Each version replaces the last."""
    one = write_checkpoint(tmp_path / "one", seed=1)
    folder = write_adapter(tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": np.full((2, SHAPE[1]), 2, np.float32),
        f"{prefix}.lora_B.weight": np.full((SHAPE[0], 2), 2, np.float32),
    }
    async with serving_here(nats_url, fleet, one, 1) as rb, rollbus.WeightPublisher(rb, model=MODEL) as publisher:
        first = await publisher.publish_adapter("tuned", folder, version=1)
        before = await rb.complete(ask(lora="tuned"))
        second = await publisher.publish_adapter("tuned", tensors, version=2, config=config)
        third = await publisher.publish_adapter("other", folder, version=1, update=False)
        generation = await rb.complete(ask(lora="tuned"))
        with pytest.raises(InvalidRequest, match="config is None"):
            await publisher.publish_adapter("tuned", tensors, version=3)
    files = ["adapter_config.json", "adapter_model.safetensors", "rollbus-manifest.json"]
    for published in (first, second, third):
        assert await names(nats_url, published.objects) == files
    assert (first.num_tensors, first.is_anchor) == (2, True)
    assert first.digest == third.digest != second.digest
    assert second.ledger is not None
    assert third.ledger is None
    for version, result in ((1, before), (2, generation)):
        assert set(result.lora_versions.tolist()) == {version}
    assert before.token_ids.tolist() != generation.token_ids.tolist()
    assert await folders(nats_url, fleet) == []


@contextlib.asynccontextmanager
async def two_ranks(nats_url: str, fleet: str) -> AsyncIterator[tuple[rollbus.WeightPublisher, ...]]:
    """Open the publishers of two ranks."""
    async with (
        rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL, rank=0, num_ranks=2) as zero,
        rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL, rank=1, num_ranks=2) as one,
    ):
        yield zero, one


async def test_ranks_publish_together(nats_url: str, fleet: str) -> None:
    """Each rank publishes its tensors, as an anchor and then as a delta, and rank 0 commits one version."""
    async with two_ranks(nats_url, fleet) as publishers:
        for version, tensors in ((1, weights(1)), (2, stepped(weights(1)))):
            async with asyncio.TaskGroup() as tasks:
                publishing = [
                    tasks.create_task(publisher.publish([item], version=version, update=False))
                    for publisher, item in zip(publishers, tensors.items(), strict=True)
                ]
            first, second = (task.result() for task in publishing)
            assert first.objects == second.objects
            assert first.digest == second.digest
            assert first.is_anchor == (version == 1)
            assert (first.num_tensors, first.num_changed, second.num_tensors) == (2, 2, 1)
            expected = ["delta-0000", "delta-0001"]
            if version == 1:
                expected = ["model-00001.safetensors", "model-00002.safetensors", "model.safetensors.index.json"]
            assert await names(nats_url, first.objects) == [*expected, "rollbus-manifest.json"]


async def test_a_tensor_of_two_ranks_is_refused_and_a_missing_rank_too(nats_url: str, fleet: str) -> None:
    """With a tensor of two ranks or a missing rank, nothing is published. The next version is an anchor."""
    async with two_ranks(nats_url, fleet) as (zero, one):
        name, other = list(weights(1))
        tensors = weights(1)

        async def both(
            version: int, of_one: list[tuple[str, Any]], timeout_s: float
        ) -> list[rollbus.PublishedWeights | BaseException]:
            async def give() -> rollbus.PublishedWeights | BaseException:
                try:
                    return await one.publish(of_one, version=version, ranks_timeout_s=timeout_s)
                except rollbus.ControlError as error:
                    return error

            async with asyncio.TaskGroup() as tasks:
                giving = tasks.create_task(give())
                try:
                    own: rollbus.PublishedWeights | BaseException = await zero.publish(
                        [(name, tensors[name])], version=version, update=False, ranks_timeout_s=SOON_S
                    )
                except rollbus.InvalidRequest as error:
                    own = error
            return [own, giving.result()]

        refused, waited = await both(1, [(name, tensors[name])], SOON_S)
        assert "was given by ranks 0 and 1" in str(refused)
        assert "did not commit" in str(waited)
        with pytest.raises(ControlError, match="these stored no list within 0 s: 1"):
            await zero.publish([(name, tensors[name])], version=2, update=False, ranks_timeout_s=0.0)
        assert await folders(nats_url, fleet) == []
        own, given = await both(3, [(other, tensors[other])], SOON_S)
        assert isinstance(own, rollbus.PublishedWeights)
        assert isinstance(given, rollbus.PublishedWeights)
        assert own.is_anchor
        assert await folders(nats_url, fleet) == [own.objects]


# A publisher without asyncio, and a publisher without a server.


pytestmark = pytest.mark.slow


def test_publish_blocking_draws_the_tensors_on_the_callers_thread(nats_url: str, fleet: str) -> None:
    """`publish_blocking` draws the tensors on the caller's thread."""
    threads = set()

    def drawn() -> Iterator[tuple[str, object]]:
        for item in weights(1).items():
            threads.add(threading.current_thread())
            yield item

    with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        with pytest.raises(rollbus.BusClosed, match="already open"):
            publisher.__enter__()
        assert publisher.publish_blocking(drawn(), version=1, update=False).is_anchor
        with pytest.raises(InvalidRequest, match="was given twice"):
            publisher.publish_blocking([*weights(1).items()] * 2, version=2, update=False)
        assert not publisher.publish_blocking(stepped(weights(1)), version=2, update=False).is_anchor
    assert threads == {threading.current_thread()}
    with pytest.raises(rollbus.BusClosed, match="publisher is not open"):
        publisher.publish_blocking(weights(1), version=3)


def test_publish_adapter_blocking_accepts_a_folder_or_tensors(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """`publish_adapter_blocking` accepts a folder, and tensors that it draws on the caller's thread."""
    folder = write_adapter(tmp_path / "adapter")
    with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        first = publisher.publish_adapter_blocking("tuned", folder, version=1, update=False)
        second = publisher.publish_adapter_blocking("tuned", weights(1), version=2, config={"r": 2}, update=False)
    assert (first.num_tensors, second.num_tensors) == (2, 2)
    assert first.objects.rpartition("/")[0] == second.objects.rpartition("/")[0]


async def test_blocking_calls_work_on_the_thread_of_a_client(nats_url: str, fleet: str) -> None:
    """The client's thread works while the event loop of its caller is blocked."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        with rollbus.WeightPublisher(rb, model=MODEL) as publisher:
            assert publisher.last_version is None
            assert publisher.publish_blocking(weights(1), version=1, update=False).is_anchor
            assert publisher.last_version == 1


async def test_a_publisher_without_a_server_raises_bus_broken(fleet: str) -> None:
    """Without a server, a publisher raises `BusBroken`, as `connect` does."""
    with pytest.raises(rollbus.BusBroken), rollbus.WeightPublisher("nats://127.0.0.1:1", fleet=fleet, model=MODEL):
        pytest.fail("it is connected")
    with pytest.raises(rollbus.BusBroken):
        async with rollbus.WeightPublisher("nats://127.0.0.1:1", fleet=fleet, model=MODEL):
            pytest.fail("it is connected")


# Publishing into a full bucket, in each way: the bucket is cleaned first, then the publication is rejected.


MEGABYTE = 1024**2
BUCKET_BYTES = 7 * MEGABYTE
"""The size of a bucket that fits two versions of a megabyte and the space that is reserved for the record."""


async def make_small_bucket(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a small bucket from which all unused objects may be removed immediately."""
    monkeypatch.setattr(version_publisher, "PRESSED_S", 0.0)
    async with connected(nats_url, name="test") as nats:
        await ensure_bucket(nats, published_bucket(fleet, MODEL), max_bytes=BUCKET_BYTES)


def tensors(version: int, size: int = MEGABYTE) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a version."""
    return {"a": np.full(size, version, np.uint8)}


async def test_a_full_bucket_is_cleaned_before_a_version_is_refused(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two unused versions fit into the bucket, and publishing can continue without limit."""
    await make_small_bucket(nats_url, fleet, monkeypatch)
    for version in range(1, 6):
        # A new publisher each time, so that each version is an anchor.
        async with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
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
    await make_small_bucket(nats_url, fleet, monkeypatch)
    async with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        await publish(publisher)


async def test_a_first_version_that_cannot_fit_is_refused_before_its_first_byte(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first version that is too large is rejected before its first byte, if its tensors are given all at once.

    With an iterator it is rejected when the bucket is full. In both cases nothing remains in the bucket.
    """
    await make_small_bucket(nats_url, fleet, monkeypatch)
    async with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        for large, said in (
            (tensors(1, 4 * MEGABYTE), "an anchor \\(first\\) takes"),
            (iter(tensors(1, 4 * MEGABYTE).items()), "has no room"),
        ):
            with pytest.raises(ControlError, match=said) as raised:
                await publisher.publish(large, version=1, update=False)
            assert raised.value.code is ControlCode.STORAGE
        assert (await publisher.publish(tensors(1), version=1, update=False)).is_anchor


# A publisher that does not know whether its commit was stored.


async def test_the_version_after_a_failed_but_stored_commit_is_an_anchor(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a commit that was stored but raised an error, the publisher publishes an anchor.

    It does not know the content of the last stored version, so it cannot compute a delta.
    """
    real = ChainKey.write
    lost: list[int | None] = []

    async def write(key: ChainKey, record: ChainRecord, sequence: int) -> int | None:
        stored = await real(key, record, sequence)
        if len(record.links) == 2 and not lost:
            lost.append(stored)
            raise rollbus.BusBroken("the test has lost the connection")
        return stored

    monkeypatch.setattr(ChainKey, "write", write)
    async with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        await publisher.publish(weights(1), version=1, update=False)
        with pytest.raises(rollbus.BusBroken, match="the test has lost"):
            await publisher.publish(stepped(weights(1)), version=2, update=False)
        third = await publisher.publish(weights(1), version=3, update=False)
        assert third.is_anchor
        assert len(await folders(nats_url, fleet)) == 3
