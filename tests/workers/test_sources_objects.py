import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollbus.bus.nats.connection import Connection
from rollbus.bus.objects.catalog import delete_prefix
from rollbus.bus.objects.reader import FolderReader, ObjectReader
from rollbus.bus.objects.writer import put_folder
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources import sources as staged
from rollbus.workers.sources import store as folder_store
from rollbus.workers.sources.sources import WeightSources
from rollbus.workers.sources.store import FolderStore, PartialFolder
from tests.support.checkpoints import MODEL, ignore, write_adapter, write_checkpoint
from tests.support.nats_server import opened
from tests.support.objects import BUCKET_BYTES, files_in, fresh_bucket


def worker(nats_url: str, tmp_path: Path, name: str) -> WeightSources:
    """Return the sources of a worker that allows no path."""
    own = write_checkpoint(tmp_path / "own")
    objects = ObjectReader(nats_url, name="test")
    return WeightSources(roots=(), own=own, cache=tmp_path / "cache", model="m", worker=name, objects=objects)


@contextlib.asynccontextmanager
async def store(nats_url: str, tmp_path: Path) -> AsyncIterator[tuple["Uploads", WeightSources]]:
    """Yield a bucket, and the sources of a worker that allows no path."""
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        yield Uploads(nats, bucket), worker(nats_url, tmp_path, "w1")


def kept(tmp_path: Path, kind: str = "checkpoints") -> set[Path]:
    """Return the complete folders on the machine, and assert that no incomplete folder is beside them."""
    entries = (tmp_path / "cache" / "shared.weights" / kind).iterdir()
    return {entry for entry in entries if not entry.name.endswith(".lock")}


class Uploads:
    """Puts folders into a bucket."""

    def __init__(self, nats: Connection, bucket: str) -> None:
        self.nats = nats
        self.bucket = bucket

    async def put(self, folder: Path) -> WeightSource:
        """Put a folder under its name."""
        objects = await put_folder(self.nats, self.bucket, folder.name, folder, max_bytes=BUCKET_BYTES)
        return WeightSource(objects=objects)


async def test_a_checkpoint_in_the_store_is_fetched_and_checked(nats_url: str, tmp_path: Path) -> None:
    """A checkpoint in the store is fetched, and checked like a path. The second time it is only checked."""
    stages: list[str] = []
    folder = write_checkpoint(tmp_path / "step-1", fill=1)
    async with store(nats_url, tmp_path) as (uploads, sources):
        source = await uploads.put(folder)

        fetched = await sources.checkpoint(source, stages.append)
        assert await sources.checkpoint(source, stages.append) == fetched

    assert files_in(fetched) == files_in(folder)
    assert fetched.is_relative_to(tmp_path / "cache")
    assert stages == ["fetching", "checking", "reading", "checking"]


@pytest.mark.parametrize(
    ("is_loaded", "code"), [(False, ControlCode.STORAGE), (True, ControlCode.HALF_WRITTEN)], ids=["before", "meanwhile"]
)
async def test_a_staged_folder_that_changes_is_not_used(
    nats_url: str, tmp_path: Path, is_loaded: bool, code: ControlCode
) -> None:
    """A staged folder that changes between check and load, or during the load, is not used.

    After another staging, it is correct.
    """
    folder = write_checkpoint(tmp_path / "step-1", fill=1)
    async with store(nats_url, tmp_path) as (uploads, sources):
        source = await uploads.put(folder)
        fetched = await sources.checkpoint(source, ignore)
        async with sources.using(fetched) as verify_unchanged:
            await verify_unchanged()
        if not is_loaded:
            change(fetched)
        with pytest.raises(ControlError, match=rf"{fetched}\b.* changed") as caught:
            await change_while_loaded(sources, fetched)
        assert caught.value.code is code

        async with sources.using(await sources.checkpoint(source, ignore)) as verify_unchanged:
            await verify_unchanged()
        assert files_in(fetched) == files_in(folder)


async def test_a_staged_adapter_that_changes_is_not_used(nats_url: str, tmp_path: Path) -> None:
    """A staged adapter that changes before or during its load is not used. After another staging, it is correct."""
    folder = write_adapter(tmp_path / "lora")
    async with store(nats_url, tmp_path) as (uploads, sources):
        source = await uploads.put(folder)
        fetched = await sources.adapter(source, ignore)
        async with sources.using_adapter(fetched) as verify_unchanged:
            await verify_unchanged()
            (fetched / "adapter_config.json").write_bytes(b"{}")
            with pytest.raises(ControlError, match=f"{fetched} changed during the load"):
                await verify_unchanged()
        with pytest.raises(ControlError, match=f"files of {fetched} were changed: stage its source again") as caught:
            async with sources.using_adapter(fetched):
                pass
        assert caught.value.code is ControlCode.STORAGE

        async with sources.using_adapter(await sources.adapter(source, ignore)):
            assert files_in(fetched) == files_in(folder)


async def change_while_loaded(sources: WeightSources, folder: Path) -> None:
    """Change a folder while an engine reads it."""
    async with sources.using(folder) as verify_unchanged:
        change(folder)
        await verify_unchanged()


def change(folder: Path) -> None:
    """Write other content of the same size into a file."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    os.utime(file, ns=(0, 0))  # a different time, whatever the resolution of the disk's clock


async def test_a_bad_checkpoint_from_the_store_is_refused_and_deleted(nats_url: str, tmp_path: Path) -> None:
    """An invalid checkpoint from the store is rejected and deleted, and does not replace a valid one."""
    async with store(nats_url, tmp_path) as (uploads, sources):
        good = await sources.checkpoint(await uploads.put(write_checkpoint(tmp_path / "step-1")), ignore)
        bad: list[dict[str, tuple[int, ...]]] = [MODEL | {"extra": (1,)}, {"other": (1,)}, {}]
        for step, shapes in enumerate(bad, start=2):
            source = await uploads.put(write_checkpoint(tmp_path / f"step-{step}", shapes))
            with pytest.raises(ControlError) as raised:
                await sources.checkpoint(source, ignore)
            assert raised.value.code is ControlCode.BAD_SOURCE

    assert kept(tmp_path) == {good}


async def test_the_last_two_checkpoints_stay(nats_url: str, tmp_path: Path) -> None:
    """The two checkpoints that were used last stay, and older ones are deleted. Adapters are counted separately."""
    async with store(nats_url, tmp_path) as (uploads, sources):
        lora = await sources.adapter(await uploads.put(write_adapter(tmp_path / "lora")), ignore)
        steps = [await uploads.put(write_checkpoint(tmp_path / f"step-{step}", fill=step)) for step in (1, 2, 3)]
        first, second = [await sources.checkpoint(source, ignore) for source in steps[:2]]
        assert await sources.checkpoint(steps[0], ignore) == first

        third = await sources.checkpoint(steps[2], ignore)

        assert kept(tmp_path) == {first, third}
        assert second not in {first, third}
        assert kept(tmp_path, "adapters") == {lora}


async def test_a_folder_that_an_engine_reads_stays(nats_url: str, tmp_path: Path) -> None:
    """A folder that an engine reads stays, also after newer folders, until the engine has read another one."""
    async with store(nats_url, tmp_path) as (uploads, sources):
        steps = [await uploads.put(write_checkpoint(tmp_path / f"step-{step}", fill=step)) for step in range(5)]
        first = await sources.checkpoint(steps[0], ignore)

        async with sources.using(first):
            others = [await sources.checkpoint(source, ignore) for source in steps[1:4]]
            assert kept(tmp_path) == {first, *others[1:]}
        await sources.checkpoint(steps[1], ignore)
        assert first in kept(tmp_path)
        async with sources.using(others[2]):
            pass
        last = await sources.checkpoint(steps[4], ignore)

        assert kept(tmp_path) == {others[2], last}


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_new_content_under_an_old_name_is_fetched(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    """New content under an old prefix is fetched, after the old content was loaded or after a while."""
    monkeypatch.setattr(staged, "UPLOAD_GOOD_S", 3600.0 if is_loaded else 0.0)
    async with store(nats_url, tmp_path) as (uploads, sources):
        source = await uploads.put(write_checkpoint(tmp_path / "step-1", fill=1))
        async with sources.using(await sources.checkpoint(source, ignore)):
            pass
        await delete_prefix(uploads.nats, f"{uploads.bucket}/step-1")
        folder = write_checkpoint(tmp_path / "step-1", fill=2)
        await uploads.put(folder)

        assert files_in(await sources.checkpoint(source, ignore)) == files_in(folder)


async def test_a_path_does_not_wait_for_the_store(tmp_path: Path) -> None:
    """During a fetch, a checkpoint on this machine can be checked. A second fetch waits."""
    opening, go_on = asyncio.Event(), asyncio.Event()
    folders: list[str] = []

    class Slow(ObjectReader):
        @contextlib.asynccontextmanager
        async def open_folder(self, objects: str) -> AsyncIterator[FolderReader]:
            folders.append(objects)
            opening.set()
            await go_on.wait()
            raise ControlError(ControlCode.STORAGE, f"objects:{objects} cannot be fetched")
            yield

    root = write_checkpoint(tmp_path / "root" / "step-1").parent
    slow = Slow("nats://127.0.0.1:1", name="test")
    sources = WeightSources(roots=[root], own=None, cache=tmp_path / "cache", model="m", worker="w1", objects=slow)

    async def fetch(objects: str) -> str:
        with pytest.raises(ControlError) as raised:
            await sources.checkpoint(WeightSource(objects=objects), ignore)
        return raised.value.message

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(fetch("b/1"))
        await opening.wait()
        second = tasks.create_task(fetch("b/2"))

        assert await sources.checkpoint(WeightSource(path=str(root / "step-1")), ignore) == root / "step-1"
        assert folders == ["b/1"]
        go_on.set()

    assert folders == ["b/1", "b/2"]
    assert "objects:b/1 cannot be fetched" in first.result()
    assert "objects:b/2 cannot be fetched" in second.result()


async def test_a_disk_that_cannot_be_cleaned_fails_no_staging(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A staged folder is complete, also if older folders cannot be deleted."""

    def fail(_store: FolderStore) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(FolderStore, "clean_up", fail)
    folder = write_checkpoint(tmp_path / "step-1", fill=1)
    async with store(nats_url, tmp_path) as (uploads, sources):
        fetched = await sources.checkpoint(await uploads.put(folder), ignore)
        await sources.clean_up()

    assert files_in(fetched) == files_in(folder)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": lambda folder: (folder / "config.json").unlink(),
    "cut": lambda folder: os.truncate(folder / "model.safetensors", 100),
    "changed": lambda folder: _flip_last_byte(folder / "model.safetensors"),
    "more": lambda folder: (folder / "more.safetensors").write_bytes(b""),
}


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("boot", ["this", "another"])
async def test_a_damaged_folder_is_rebuilt_by_the_next_worker(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, boot: str
) -> None:
    """The next worker rebuilds a damaged folder, although both workers hold it.

    The damage may come from a program or from a crash of the machine.
    """
    folder = write_checkpoint(tmp_path / "step-1", fill=1)
    async with store(nats_url, tmp_path) as (uploads, sources):
        source = await uploads.put(folder)
        fetched = await sources.checkpoint(source, ignore)
        late = worker(nats_url, tmp_path, "w2")
        for one in (sources, late):
            async with one.using(await one.checkpoint(source, ignore)):
                pass
        if boot == "another":
            monkeypatch.setattr(folder_store, "boot_id", lambda: "another boot")
        DAMAGES[damage](fetched)

        for one in (late, sources):
            assert files_in(await one.checkpoint(source, ignore)) == files_in(folder)

        assert late.last_staged.fetched_bytes == sum(map(len, files_in(folder).values()))
        assert sources.last_staged.fetched_bytes == 0
        late.close()
    assert kept(tmp_path) == {fetched}


async def test_a_folder_that_was_touched_and_not_changed_stays(nats_url: str, tmp_path: Path) -> None:
    """A folder with a new time of change is compared with the store once, and stays if its content is equal."""
    async with store(nats_url, tmp_path) as (uploads, sources):
        source = await uploads.put(write_checkpoint(tmp_path / "step-1", fill=1))
        fetched = await sources.checkpoint(source, ignore)
        (fetched / "config.json").touch()
        assert await sources.checkpoint(source, ignore) == fetched
        assert sources.last_staged.fetched_bytes == 0
        await delete_prefix(uploads.nats, f"{uploads.bucket}/step-1")

        assert await sources.checkpoint(source, ignore) == fetched


async def test_an_adapter_is_loaded_again_without_the_store(nats_url: str, tmp_path: Path) -> None:
    """A reload uses the adapter's files on the machine, however old they are.

    Requests wait during a reload, so nothing is fetched.
    """
    async with store(nats_url, tmp_path) as (uploads, sources):
        source = await uploads.put(write_adapter(tmp_path / "lora"))
        folder = await sources.adapter(source, ignore)
        await delete_prefix(uploads.nats, f"{uploads.bucket}/lora")

        for _ in range(2):
            assert await sources.adapter(source, ignore, is_reload=True) == folder
        with pytest.raises(ControlError, match="has no objects"):
            await sources.adapter(source, ignore)


async def test_a_builder_touches_its_lock_file_during_the_build(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder touches its lock file, so that waiting workers see its progress. After the build, it stops."""
    touched: list[PartialFolder] = []

    def touch(partial: PartialFolder) -> None:
        touched.append(partial)

    monkeypatch.setattr(PartialFolder, "touch", touch)
    async with store(nats_url, tmp_path) as (uploads, sources):
        source = await uploads.put(write_checkpoint(tmp_path / "step-1", fill=1))
        await sources.checkpoint(source, ignore)
        count = len(touched)
        await sources.checkpoint(source, ignore)

    assert count > len(["fetching", "checking"])
    assert len(touched) == count


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def sources(tmp_path: Path, *, is_own_known: bool = True) -> WeightSources:
    """Sources that allow `tmp_path / "root"`."""
    own = write_checkpoint(tmp_path / "own") if is_own_known else None
    return WeightSources(
        roots=[tmp_path / "root"], own=own, cache=tmp_path / "cache", model="m", worker="w1", objects=None
    )


async def refusal(checked: WeightSources, path: Path) -> ControlError:
    """Return the error for an adapter that must be rejected."""
    with pytest.raises(ControlError) as raised:
        await checked.adapter(WeightSource(path=str(path)), ignore)
    return raised.value


async def test_a_valid_adapter_is_accepted_with_its_real_path(tmp_path: Path) -> None:
    """An adapter is accepted if its pairs fit weights of the base model."""
    folder = write_adapter(tmp_path / "root" / "lora")

    assert await sources(tmp_path).adapter(WeightSource(path=str(folder)), ignore) == folder


async def test_an_adapter_outside_the_roots_is_refused(tmp_path: Path) -> None:
    """The roots of weights apply to adapters too."""
    (tmp_path / "root").mkdir()

    error = await refusal(sources(tmp_path), write_adapter(tmp_path / "lora"))

    assert error.code is ControlCode.PATH_REFUSED


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {f"{Q.replace('q_proj', 'x.q_proj')}.lora_{side}.weight": (2, 2) for side in "AB"},
            "is for another base: it has 'model.layers.0.self_attn.x.q_proj', which the worker's model does not have",
        ),
        (
            {f"{Q}.lora_A.weight": (2, 4), f"{Q}.lora_B.weight": (7, 2)},
            "'model.layers.0.self_attn.q_proj' makes [7, 4]; expected: [6, 4], as the worker's model",
        ),
    ],
)
async def test_an_adapter_of_another_base_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    """Modules that the base lacks or has in another shape are named.

    Without a checkpoint of the worker, they are accepted.
    """
    folder = write_adapter(tmp_path / "root" / "lora", shapes=shapes)

    error = await refusal(sources(tmp_path), folder)

    assert error.code is ControlCode.BAD_SOURCE
    assert said in error.message
    unknown = sources(tmp_path, is_own_known=False)
    assert await unknown.adapter(WeightSource(path=str(folder)), ignore) == folder


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({f"{Q}.lora_A.weight": (2, 4)}, "has only lora_A of 'model.layers.0.self_attn.q_proj'"),
        ({f"{Q}.lora_A.weight": (2, 4), f"{Q}.lora_B.weight": (6, 1)}, "their ranks differ"),
        ({f"{Q}.lora_A.weight": (3, 4), f"{Q}.lora_B.weight": (6, 3)}, "with the rank 3; expected: 2"),
        ({f"{Q}.lora_A.weight": (2, 4, 1), f"{Q}.lora_B.weight": (6, 2)}, "expected: a matrix of floats"),
        ({f"{Q}.weight": (2, 4)}, f"has the tensor '{Q}.weight'; expected: names that end in .lora_A.weight"),
        (
            {"base_model.model.model.norm.lora_A.weight": (2, 4), "base_model.model.model.norm.lora_B.weight": (4, 2)},
            "has 'model.norm', which is none of the target_modules",
        ),
        ({}, "has no tensors"),
    ],
)
async def test_an_adapter_that_contradicts_itself_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    """Incomplete pairs, different ranks, and tensors that are no LoRA are named, also if the base is unknown."""
    folder = write_adapter(tmp_path / "root" / "lora", shapes=shapes)

    assert said in (await refusal(sources(tmp_path, is_own_known=False), folder)).message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "has peft_type='IA3'; expected: 'LORA'"),
        ({"r": 0}, "adapter_config.json does not decode"),
        ({"r": 513}, "adapter_config.json does not decode"),
        ({"r": "2"}, "adapter_config.json does not decode"),
        ({"target_modules": []}, "has no target_modules"),
        ({"target_modules": None}, "adapter_config.json does not decode"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save=['lm_head']"),
        ({"use_dora": True}, "has use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern={'q_proj': 2}; expected: plain LoRA without it"),
        ({"alpha_pattern": {"q_proj": 8}}, "has alpha_pattern={'q_proj': 8"),
        ({"bias": "all"}, "has bias='all'"),
    ],
)
async def test_an_adapter_of_another_kind_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """Settings that engines do not support, or would apply wrongly, are rejected. The error names the setting."""
    folder = write_adapter(tmp_path / "root" / "lora", **config)

    assert said in (await refusal(sources(tmp_path), folder)).message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_missing_file_of_an_adapter_is_named(tmp_path: Path, name: str) -> None:
    """An adapter needs both of its files."""
    folder = write_adapter(tmp_path / "root" / "lora")
    (folder / name).unlink()

    assert f"{name} is missing" in (await refusal(sources(tmp_path), folder)).message
