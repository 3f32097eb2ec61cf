"""Chains of published versions in a real store: each path to a version gives the same folder or an error."""

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollbus.bus.objects.catalog import delete_prefix
from rollbus.bus.objects.reader import ObjectReader
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.manifest import Link, delta_name
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import MODEL, ignore, write_checkpoint
from tests.support.nats_server import opened
from tests.support.objects import files_in, fresh_bucket
from tests.support.versions import BUCKET_BYTES, Versions, folder_content, random_weights

Weights = dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]]


@contextlib.asynccontextmanager
async def chain(nats_url: str, tmp_path: Path) -> AsyncIterator[Versions]:
    """Yield an empty chain in its own bucket."""
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        yield Versions(nats, bucket, tmp_path)


def worker(nats_url: str, tmp_path: Path, name: str = "w1") -> WeightSources:
    """Return the sources of a worker on the machine `tmp_path`."""
    own = write_checkpoint(tmp_path / "own", dtype="BF16")
    objects = ObjectReader(nats_url, name="test")
    return WeightSources(roots=(), own=own, cache=tmp_path / "cache", model="m", worker=name, objects=objects)


def stepped(weights: Weights, seed: int) -> Weights:
    """Return a copy with some changed elements in all tensors but the last."""
    rng = np.random.default_rng(seed)
    after = {name: content.copy() for name, content in weights.items()}
    for content in list(after.values())[:-1]:
        content[rng.integers(0, len(content), 3)] ^= 1
    return after


async def publish_steps(versions: Versions, num: int) -> list[Weights]:
    """Publish an anchor and `num` deltas, and return their weights."""
    steps = [random_weights(0)]
    await versions.publish(steps[0])
    for seed in range(1, num + 1):
        steps.append(stepped(steps[-1], seed))
        await versions.publish(steps[-1])
    return steps


def fetched(sources: WeightSources) -> int:
    """Return the number of bytes that the last staging fetched."""
    return sources.last_staged.fetched_bytes


async def test_each_version_equals_the_checkpoint_and_only_changes_are_fetched(nats_url: str, tmp_path: Path) -> None:
    """Each version is the full checkpoint, byte for byte. After the first one, only changes are fetched."""
    stages: list[str] = []
    sources = worker(nats_url, tmp_path)
    async with chain(nats_url, tmp_path) as versions:
        weights = random_weights(0)
        for seed in range(1, 6):
            source = await versions.publish(weights)
            folder = await sources.checkpoint(source, stages.append)
            async with sources.using(folder):
                assert files_in(folder) == folder_content(weights)
            link = versions.links[-1]
            assert folder.name == link.digest
            assert fetched(sources) == (link.anchor_bytes if seed == 1 else link.delta_bytes)
            weights = stepped(weights, seed)

    assert stages[:3] == ["fetching", "checking", "fetching"]
    assert stages[3:6] == ["building", "checking", "fetching"]
    assert sources.staging is None
    assert len([path for path in (tmp_path / "cache/shared.weights/checkpoints").iterdir() if path.is_dir()]) == 2


async def test_a_version_of_deltas_has_the_digest_of_a_plain_copy(nats_url: str, tmp_path: Path) -> None:
    """The digest of a published version comes from its manifest, and equals that of its files at a path."""
    sources = worker(nats_url, tmp_path)
    async with chain(nats_url, tmp_path) as versions:
        await publish_steps(versions, 2)
        folder = await sources.checkpoint(versions.source(), ignore)
    plain = WeightSources(roots=(tmp_path,), own=None, cache=tmp_path / "2", model="m", worker="w", objects=None)
    copy = shutil.copytree(folder, tmp_path / "copy")
    await plain.checkpoint(WeightSource(path=str(copy)), ignore)

    digest = sources.digest_of(folder)
    assert digest is not None
    assert digest == plain.digest_of(copy)


async def test_a_worker_reports_the_sizes_of_its_staged_version(nats_url: str, tmp_path: Path) -> None:
    """A worker reports the bytes of its staged version and of the model, the chain length and the store's use.

    This holds also if the worker found the version on its machine.
    """
    async with chain(nats_url, tmp_path) as versions:
        await publish_steps(versions, 2)
        link = versions.links[-1]
        for name in ("w1", "w2"):
            sources = worker(nats_url, tmp_path, name)
            await sources.checkpoint(versions.source(), ignore)
            found = sources.published
            assert (found.version, found.stored_bytes, found.chain_length) == (link.version, link.delta_bytes, 2)
            assert found.model_bytes == sum(content.nbytes for content in random_weights(0).values())
            assert found.used_bytes > (versions.links[0].anchor_bytes or 0)
            assert found.limit_bytes == BUCKET_BYTES


async def test_a_staged_version_needs_no_store(nats_url: str, tmp_path: Path) -> None:
    """A staged version is only checked, also if the store has lost it."""
    sources = worker(nats_url, tmp_path)
    async with chain(nats_url, tmp_path) as versions:
        await publish_steps(versions, 1)
        folder = await sources.checkpoint(versions.source(), ignore)
        for link in versions.links:
            await delete_prefix(versions.nats, link.objects)

        assert await sources.checkpoint(versions.source(), ignore) == folder


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_version_that_was_damaged_on_the_machine_is_built_again(
    nats_url: str, tmp_path: Path, is_lost: bool
) -> None:
    """The next worker builds a damaged version again, from the other folders of the machine or from the anchor."""
    sources, other = worker(nats_url, tmp_path), worker(nats_url, tmp_path, "w2")
    async with chain(nats_url, tmp_path) as versions:
        [*_, newest] = await publish_steps(versions, 2)
        folder = await sources.checkpoint(versions.source(), ignore)
        async with other.using(await other.checkpoint(versions.source(), ignore)):
            pass
        path = folder / "model.safetensors"
        if is_lost:
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))

        for one in (other, sources):
            assert files_in(await one.checkpoint(versions.source(), ignore)) == folder_content(newest)


async def test_a_late_worker_fetches_the_anchor_and_all_later_deltas(nats_url: str, tmp_path: Path) -> None:
    """A late worker fetches the anchor and all deltas since.

    A worker that missed three versions fetches three deltas.
    """
    late, slow = worker(nats_url, tmp_path / "late"), worker(nats_url, tmp_path / "slow")
    async with chain(nats_url, tmp_path) as versions:
        steps = await publish_steps(versions, 1)
        async with slow.using(await slow.checkpoint(versions.source(), ignore)):
            pass
        for seed in (7, 8, 9):
            steps.append(stepped(steps[-1], seed))
            await versions.publish(steps[-1])
        source, links = versions.source(), versions.links

        for sources in (late, slow):
            assert files_in(await sources.checkpoint(source, ignore)) == folder_content(steps[-1])

    deltas = [link.delta_bytes or 0 for link in links]
    assert fetched(late) == (links[0].anchor_bytes or 0) + sum(deltas)
    assert fetched(slow) == sum(deltas[-3:])


async def test_the_second_worker_of_a_machine_fetches_nothing(nats_url: str, tmp_path: Path) -> None:
    """The second worker of a machine uses the folder that the first has built."""
    first, second = worker(nats_url, tmp_path), worker(nats_url, tmp_path, "w2")
    async with chain(nats_url, tmp_path) as versions:
        await publish_steps(versions, 2)
        folder = await first.checkpoint(versions.source(), ignore)

        assert await second.checkpoint(versions.source(), ignore) == folder
        assert fetched(second) == 0


async def test_a_late_worker_begins_with_the_last_anchor(nats_url: str, tmp_path: Path) -> None:
    """A late worker begins with the last anchor. A worker with the version before it fetches only the delta."""
    late, follower = worker(nats_url, tmp_path / "late"), worker(nats_url, tmp_path / "follower")
    async with chain(nats_url, tmp_path) as versions:
        steps = await publish_steps(versions, 1)
        await follower.checkpoint(versions.source(), ignore)
        steps.append(stepped(steps[-1], 5))
        source = await versions.publish(steps[-1], is_anchor=True)
        link = versions.links[-1]

        for sources in (late, follower):
            assert files_in(await sources.checkpoint(source, ignore)) == folder_content(steps[-1])

    assert (fetched(late), fetched(follower)) == (link.anchor_bytes, link.delta_bytes)


@pytest.mark.parametrize("fault", ["hole", "corrupt delta", "wrong base", "damaged base"])
async def test_a_worker_with_a_damaged_chain_builds_from_the_anchor(nats_url: str, tmp_path: Path, fault: str) -> None:
    """If the chain is damaged, the worker builds the same folder from the anchor."""
    sources = worker(nats_url, tmp_path)
    async with chain(nats_url, tmp_path) as versions:
        steps = await publish_steps(versions, 1)
        base = await sources.checkpoint(versions.source(), ignore)
        steps.append(stepped(steps[-1], 5))
        files = {delta_name(0): b"?"} if fault == "corrupt delta" else None
        hole = (await versions.publish(steps[-1], files=files)).objects
        steps.append(stepped(steps[-1], 6))
        source = await versions.publish(steps[-1], is_anchor=True)
        if fault == "hole":
            assert hole is not None
            await delete_prefix(versions.nats, hole)
        elif fault in {"wrong base", "damaged base"}:
            path = base / "model.safetensors"
            content = bytearray(path.read_bytes())
            content[-1 if fault == "wrong base" else 9] ^= 1
            path.write_bytes(content)

        assert files_in(await sources.checkpoint(source, ignore)) == folder_content(steps[-1])
    assert fetched(sources) >= (versions.links[-1].anchor_bytes or 0)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model.safetensors": None}, "lacks model.safetensors"),
        ({"config.json": None}, "lacks config.json"),
        ({"config.json": b"{}"}, "config.json is damaged: its SHA-256 is"),
        ({"model.safetensors": folder_content(random_weights(1))["model.safetensors"]}, "has the SHA-256"),
        ({"model.safetensors": b" " * 1000}, "lacks model.safetensors, or its size is not the"),
    ],
)
async def test_a_wrong_anchor_is_refused(
    nats_url: str, tmp_path: Path, files: dict[str, bytes | None], said: str
) -> None:
    """A wrong anchor is rejected if no other path leads to the version.

    No file of it remains, and a later valid anchor is built.
    """
    sources = worker(nats_url, tmp_path)
    async with chain(nats_url, tmp_path) as versions:
        source = await versions.publish(random_weights(0), files=files)
        with pytest.raises(ControlError) as raised:
            await sources.checkpoint(source, ignore)
        left = [path for path in (tmp_path / "cache/shared.weights/checkpoints").iterdir() if path.is_dir()]
        good = await versions.publish(random_weights(0), is_anchor=True, is_delta=False)

        assert files_in(await sources.checkpoint(good, ignore)) == folder_content(random_weights(0))
    assert raised.value.code is ControlCode.BAD_SOURCE
    assert said in raised.value.message
    assert left == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offset": 10_000}, "up to byte"),
        ({"num_bytes": 2**61, "offset": 2**61}, "up to byte"),
        ({"object": 7}, "in delta-0007, which is missing"),
        ({"body_bytes": 2**40}, "larger than the tensor can have"),
        ({"num_changed": 2**40}, "larger than the tensor can have"),
        ({"encoding": "dense", "num_changed": 0}, "cannot be made of"),
        ({"num_changed": 4}, "cannot be made of"),
        ({"object": 5000}, "does not decode"),
        ({"offset": -1}, "does not decode"),
    ],
)
async def test_a_hostile_delta_is_refused(nats_url: str, tmp_path: Path, change: dict[str, object], said: str) -> None:
    """Sizes and positions of a delta are checked before any allocation. An invalid delta leaves no folder."""
    sources = worker(nats_url, tmp_path)
    async with chain(nats_url, tmp_path) as versions:
        await publish_steps(versions, 0)
        base = await sources.checkpoint(versions.source(), ignore)
        source = await versions.publish(stepped(random_weights(0), 1), change=change)
        with pytest.raises(ControlError) as raised:
            await sources.checkpoint(source, ignore)

    assert raised.value.code is ControlCode.BAD_SOURCE
    assert said in raised.value.message
    assert [path for path in base.parent.iterdir() if path.is_dir()] == [base]


async def test_a_version_with_other_tensors_than_the_workers_is_rejected(nats_url: str, tmp_path: Path) -> None:
    """Other tensors than those of the worker's checkpoint are rejected before the fetch, with the first name.

    An adapter is rejected as a checkpoint too.
    """
    sources = worker(nats_url, tmp_path)
    name = next(iter(MODEL))
    shapes = {
        "lacks the tensor 'model.embed": {other: shape for other, shape in MODEL.items() if other != name},
        "has the tensor 'more'": {**MODEL, "more": (2**20, 2**10)},
        "has the tensor 'model.embed_tokens.weight' as BF16[8, 8]": {**MODEL, name: (8, 8)},
    }
    async with chain(nats_url, tmp_path) as versions:
        for said, wrong in shapes.items():
            small = {name: (4,) if name == "more" else shape for name, shape in wrong.items()}
            others = Versions(versions.nats, versions.bucket, tmp_path, small)
            with pytest.raises(ControlError) as raised:
                await sources.checkpoint(await others.publish(random_weights(0, small)), ignore)
            assert raised.value.code is ControlCode.BAD_SOURCE
            assert said.partition("[")[0] in raised.value.message.replace("model.safetensors", "")
        adapter = await versions.publish(random_weights(0), manifest={"adapter": "a"})
        with pytest.raises(ControlError, match="is the adapter 'a', and no checkpoint"):
            await sources.checkpoint(adapter, ignore)
        with pytest.raises(ControlError, match="is a checkpoint, and no adapter"):
            await sources.adapter(await versions.publish(random_weights(0)), ignore)
    assert not (tmp_path / "cache/shared.weights/checkpoints").exists()


@pytest.mark.parametrize("adapter", [None, "a"])
async def test_a_version_of_another_model_is_refused(nats_url: str, tmp_path: Path, adapter: str | None) -> None:
    """A version of another model is rejected before the fetch, also if its tensors fit.

    The same holds for an adapter, whose manifest names its base.
    """
    sources = worker(nats_url, tmp_path)
    async with chain(nats_url, tmp_path) as versions:
        source = await versions.publish(random_weights(0), manifest={"model": "other", "adapter": adapter})
        with pytest.raises(ControlError, match="is of the model 'other'; expected: 'm', as the worker's") as raised:
            await (sources.adapter if adapter else sources.checkpoint)(source, ignore)
    assert raised.value.code is ControlCode.BAD_SOURCE
    assert not (tmp_path / "cache/shared.weights").exists()


def cycle(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """Return a chain that returns to its first version."""
    return (*links, links[0])


def chain_in_another_bucket(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """Return a chain that begins in another bucket."""
    return (replace(links[0], objects="other/versions/0-1-00000000"), *links[1:])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cycle, "has a chain with a version twice"),
        (
            chain_in_another_bucket,
            "has the version objects:other/versions/0-1-00000000 in its chain, which is in another bucket",
        ),
    ],
)
async def test_an_invalid_chain_is_rejected_before_the_fetch(
    nats_url: str, tmp_path: Path, spoil: Callable[[tuple[Link, ...]], tuple[Link, ...]], said: str
) -> None:
    """An invalid chain is rejected before the fetch, although an anchor alone would suffice."""
    sources = worker(nats_url, tmp_path)
    async with chain(nats_url, tmp_path) as versions:
        steps = await publish_steps(versions, 1)
        versions.links = spoil(versions.links)
        source = await versions.publish(stepped(steps[-1], 5), is_anchor=True)
        with pytest.raises(ControlError, match=said) as raised:
            await sources.checkpoint(source, ignore)
    assert raised.value.code is ControlCode.BAD_SOURCE
    assert not (tmp_path / "cache/shared.weights").exists()
