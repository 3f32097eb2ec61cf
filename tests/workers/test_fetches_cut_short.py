"""Incomplete fetches: fetched bytes stay for the next try, and nothing remains of a version that was deleted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rollbus.bus.objects.catalog import delete_prefix
from rollbus.bus.objects.reader import FolderReader, ObjectReader
from rollbus.bus.objects.writer import put_folder
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import ignore, write_checkpoint, write_sharded
from tests.support.nats_server import opened
from tests.support.objects import BUCKET_BYTES, files_in, fresh_bucket
from tests.support.versions import Versions, folder_content, random_weights

OnFetch = Callable[[str, Path], Awaitable[None]]


@pytest.fixture
def on_fetch(monkeypatch: pytest.MonkeyPatch) -> list[OnFetch]:
    """Return a list of functions, of which each is called once before an object is fetched."""
    todo: list[OnFetch] = []
    fetch = FolderReader.fetch

    async def fetch_with(folder: FolderReader, name: str, into: Path, on_bytes: Callable[[int], None]) -> None:
        if todo:
            await todo.pop(0)(name, into)
        await fetch(folder, name, into, on_bytes)

    monkeypatch.setattr(FolderReader, "fetch", fetch_with)
    return todo


async def continue_fetch(name: str, into: Path) -> None:
    """Do nothing, so that the object is fetched."""


@contextlib.asynccontextmanager
async def machine(
    nats_url: str, tmp_path: Path, *, dtype: str = "BF16"
) -> AsyncIterator[tuple[Versions, WeightSources]]:
    """Yield an empty chain, and the sources of a worker without local files."""
    own = write_checkpoint(tmp_path / "own", dtype=dtype)
    objects = ObjectReader(nats_url, name="test")
    sources = WeightSources(roots=(), own=own, cache=tmp_path / "cache", model="m", worker="w1", objects=objects)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        yield Versions(nats, bucket, tmp_path), sources


def entries(tmp_path: Path) -> list[str]:
    """Return the entries of the checkpoint folder, complete or not, without locks."""
    root = tmp_path / "cache" / "shared.weights" / "checkpoints"
    return [entry.name for entry in root.iterdir() if not entry.name.endswith(".lock")]


async def cut_short(sources: WeightSources, source: WeightSource, on_fetch: list[OnFetch], num_whole: int) -> None:
    """Cancel a staging in the middle of the object after `num_whole` objects."""
    is_there = asyncio.Event()

    async def stop(name: str, into: Path) -> None:
        await asyncio.to_thread(into.write_bytes, b"a part of it")
        is_there.set()
        await asyncio.Event().wait()

    on_fetch[:] = [*[continue_fetch] * num_whole, stop]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(sources.checkpoint(source, ignore))
        await is_there.wait()
        task.cancel()
    assert task.cancelled()


@pytest.mark.parametrize("num_whole", range(4))
async def test_a_cancelled_fetch_of_a_version_continues_with_incomplete_objects(
    nats_url: str, tmp_path: Path, on_fetch: list[OnFetch], num_whole: int
) -> None:
    """After a cancelled staging, only the incomplete objects of the anchor and two deltas are fetched again."""
    async with machine(nats_url, tmp_path) as (versions, sources):
        weights = random_weights(0)
        await versions.publish(weights)
        for seed in (1, 2):
            weights = random_weights(seed)
            source = await versions.publish(weights)
        await cut_short(sources, source, on_fetch, num_whole)
        assert [name[0] for name in entries(tmp_path)] == ["."]

        folder = await sources.checkpoint(source, ignore)

        assert files_in(folder) == folder_content(weights)
        first, *deltas = versions.links
        config = len(folder_content(weights)["config.json"])
        sizes = [(first.anchor_bytes or 0) - config, config, *(link.delta_bytes or 0 for link in deltas)]
        assert sources.last_staged.fetched_bytes == sum(sizes[num_whole:])
        assert entries(tmp_path) == [folder.name]


async def test_a_cancelled_fetch_of_an_upload_continues_with_incomplete_files(
    nats_url: str, tmp_path: Path, on_fetch: list[OnFetch]
) -> None:
    """After a cancelled staging, only the incomplete files of an uploaded folder are fetched again."""
    async with machine(nats_url, tmp_path, dtype="F32") as (versions, sources):
        folder = write_sharded(tmp_path / "step-1")
        objects = await put_folder(versions.nats, versions.bucket, "step-1", folder, max_bytes=BUCKET_BYTES)
        source = WeightSource(objects=objects)
        await cut_short(sources, source, on_fetch, 2)

        assert files_in(await sources.checkpoint(source, ignore)) == files_in(folder)

    contents = [len(content) for _, content in sorted(files_in(folder).items())]
    assert len(contents) == 3
    assert sources.last_staged.fetched_bytes == contents[2]


@pytest.mark.parametrize(("number", "num_whole"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)])
async def test_a_version_deleted_during_its_fetch_leaves_no_files(
    nats_url: str, tmp_path: Path, on_fetch: list[OnFetch], number: int, num_whole: int
) -> None:
    """If a version's anchor or delta is deleted during the fetch, the error says so and nothing remains.

    The next version is built normally.
    """
    async with machine(nats_url, tmp_path) as (versions, sources):
        await versions.publish(random_weights(0))
        source = await versions.publish(random_weights(1))
        deleted = versions.links[number].objects

        async def delete(name: str, into: Path) -> None:
            assert await delete_prefix(versions.nats, deleted)

        on_fetch[:] = [*[continue_fetch] * num_whole, delete]
        with pytest.raises(ControlError, match="deleted meanwhile") as raised:
            await sources.checkpoint(source, ignore)
        left = entries(tmp_path)
        following = await versions.publish(random_weights(2), is_anchor=True)

        assert files_in(await sources.checkpoint(following, ignore)) == folder_content(random_weights(2))
    assert raised.value.code is ControlCode.BAD_SOURCE
    assert left == []
