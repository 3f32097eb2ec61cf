"""Digests of checkpoints and adapters: what they depend on, and when a machine hashes a file again."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.weights import WeightSource
from rollbus.workers.control.staging import StageKey
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.sources import content
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import ignore, write_adapter, write_checkpoint, write_safetensors, write_sharded
from tests.workers.control_support import load_lora, rig, source, update


def sources(tmp_path: Path, name: str = "w1") -> WeightSources:
    """Return the sources of one worker process of a machine."""
    return WeightSources(roots=(tmp_path,), own=None, cache=tmp_path / "cache", model="m", worker=name, objects=None)


async def digest(of: WeightSources, folder: Path, *, is_adapter: bool = False) -> str:
    """Stage a directory, and return the digest of its content."""
    source = WeightSource(path=str(folder))
    staged = await (of.adapter(source, ignore) if is_adapter else of.checkpoint(source, ignore))
    found = of.digest_of(staged)
    assert found is not None
    return found


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each tensor that is hashed."""
    names: list[str] = []
    run: Callable[..., None] = content._hash_tensor

    def count(name: str, *others: object) -> None:
        names.append(name)
        run(name, *others)

    monkeypatch.setattr(content, "_hash_tensor", count)
    return names


async def test_the_digest_depends_on_tensors_only(tmp_path: Path) -> None:
    """Shards, other files, padding and the order of tensors do not change the digest; values, names and dtypes do."""
    shapes = {"a": (2, 4), "b": (4,)}
    one = write_checkpoint(tmp_path / "one", shapes)
    two = write_sharded(tmp_path / "two", {"b": (4,), "x": (0,), "a": (2, 4)})
    three = write_checkpoint(tmp_path / "three", {"b": (4,), "a": (2, 4), "x": (0,)})
    padded = tmp_path / "four"
    shutil.copytree(three, padded)
    (padded / "config.json").write_text("{}")
    data = (padded / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    (padded / "model.safetensors").write_bytes(
        (size + 8).to_bytes(8, "little") + data[8 : 8 + size] + b" " * 8 + data[8 + size :]
    )
    own = sources(tmp_path)

    same = {await digest(own, folder) for folder in (two, three, padded)}
    others = [
        await digest(own, one),
        await digest(own, write_checkpoint(tmp_path / "five", shapes, fill=1)),
        await digest(own, write_checkpoint(tmp_path / "six", {"a": (4, 2), "b": (4,)})),
        await digest(own, write_checkpoint(tmp_path / "seven", {"a": (2, 4), "c": (4,)})),
    ]
    assert len(same) == 1
    assert len({*same, *others}) == 5


async def test_the_config_of_an_adapter_is_part_of_its_digest(tmp_path: Path) -> None:
    """Equal tensors with another `lora_alpha` are another adapter."""
    own = sources(tmp_path)
    one, two = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two", lora_alpha=32)
    same = Path(shutil.copytree(one, tmp_path / "same"))

    digests = [await digest(own, folder, is_adapter=True) for folder in (one, two, same)]
    assert digests[0] == digests[2] != digests[1]


async def test_a_machine_hashes_a_settled_file_once(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the machine takes the digests of a file that was settled when it was hashed."""
    monkeypatch.setattr(content, "SETTLED_NS", 0)
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    first = await digest(sources(tmp_path), folder)
    second = await digest(sources(tmp_path, "w2"), folder)

    assert first == second
    assert hashed == ["a"]


async def test_a_young_file_is_hashed_again(tmp_path: Path, hashed: list[str]) -> None:
    """The digests of a file that changed in the last two seconds are not kept for other processes."""
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    for name in ("w1", "w2"):
        await digest(sources(tmp_path, name), folder)

    assert hashed == ["a", "a"]


@pytest.mark.parametrize("change", ["in place", "replaced"])
async def test_a_change_that_keeps_size_and_time_is_found(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other content of the same size and modification time is hashed again, by the same and by other processes."""
    monkeypatch.setattr(content, "SETTLED_NS", 0)
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    file, own = folder / "model.safetensors", sources(tmp_path)
    before, stat = await digest(own, folder), file.stat()
    if change == "replaced":
        write_safetensors(tmp_path / "new", {"a": (2,)}, fill=1).rename(file)
    else:
        write_safetensors(file, {"a": (2,)}, fill=1)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert before != await digest(own, folder) == await digest(sources(tmp_path, "w2"), folder)


async def test_a_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a mix of two contents would be worthless."""
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    file, run = folder / "model.safetensors", content.hash_range

    def overwrite(*args: Any) -> str:
        digest = run(*args)
        write_safetensors(file, {"a": (2,)}, fill=1)
        os.utime(file, ns=(0, 0))
        return digest

    monkeypatch.setattr(content, "hash_range", overwrite)
    with pytest.raises(ControlError, match=f"{file} changed while it was hashed") as raised:
        await digest(sources(tmp_path), folder)
    assert raised.value.code is ControlCode.STORAGE


async def test_a_start_checkpoint_that_changes_while_it_is_hashed_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine loads the checkpoint at the same time, so nobody knows what it has read."""
    run = content.hash_range

    def overwrite(*args: Any) -> str:
        digest = run(*args)
        os.utime(tmp_path / "own" / "model.safetensors", ns=(0, 0))
        return digest

    async with rig(tmp_path, prove_reload=False) as worker:
        monkeypatch.setattr(content, "hash_range", overwrite)
        await worker.weights.start.run(None)
        await worker.weights.verify_start()
        assert worker.standing == (1, True)
        assert worker.weights.problem == f"{tmp_path / 'own'} changed during the load"


async def test_digests_need_no_writable_cache(tmp_path: Path, hashed: list[str]) -> None:
    """If the cache cannot be written, each process hashes for itself."""
    (tmp_path / "cache").write_text("no directory")
    folder = write_checkpoint(tmp_path / "one", {"a": (2,)})
    assert await digest(sources(tmp_path), folder) == await digest(sources(tmp_path, "w2"), folder)
    assert hashed == ["a", "a"]


async def test_other_formats_are_whole_files(tmp_path: Path) -> None:
    """A start checkpoint without safetensors files has the digest of the bytes of its weight files."""
    digests = []
    for name, data in (("one", b"x"), ("two", b"x"), ("three", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(data)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(name))
        own = WeightSources(
            roots=(), own=tmp_path / name, cache=tmp_path / "cache", model="m", worker="w", objects=None
        )
        digests.append(await own.start_digest())
    assert digests[0] == digests[1] != digests[2]


async def test_an_error_of_the_engine_is_explained_by_a_change_of_the_files(tmp_path: Path) -> None:
    """If the engine rejects weights because files changed during the load, the error says so."""

    class Comparing(SyntheticEngine):
        async def load_weights(self, path: Path) -> None:
            """Fail as an engine that compares its weights with files that have changed."""
            if path.name == "2":
                write_checkpoint(path, fill=7)
                os.utime(path / "model.safetensors", ns=(0, 0))
                raise ControlError(ControlCode.HALF_WRITTEN, "did not load lm_head.weight")
            await super().load_weights(path)

    async with rig(tmp_path, SyntheticConfig(), engine=Comparing) as worker:
        path = worker.checkpoint("2", 2)
        with pytest.raises(ControlError, match=f"{path}/.* changed during the load") as raised:
            await worker.weights.update(update(path, 2), worker.report)
        assert raised.value.code is ControlCode.HALF_WRITTEN
        assert worker.standing == (1, True)


async def test_weights_with_the_recorded_digest_are_current_wherever_they_came_from(tmp_path: Path) -> None:
    """A worker that holds the recorded content applies the version without a load, and refuses other content."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        await worker.weights.update(update(path, 2), worker.report)
        held = worker.weights.digest
        worker.stages.clear()
        write_checkpoint(path, fill=3)
        await worker.weights.update(update(tmp_path / "gone", 2, digest=held), worker.report)
        assert worker.stages == []
        with pytest.raises(ControlError, match=f"version 3 was {held}; {path} now holds ") as raised:
            await worker.weights.update(update(path, 3, digest=held), worker.report)
        assert raised.value.code is ControlCode.OTHER_CONTENT
        assert worker.standing == (2, False)


async def test_an_adapter_is_loaded_only_with_its_recorded_content(tmp_path: Path) -> None:
    """An adapter whose files hold other content than recorded is not loaded."""
    async with rig(tmp_path) as worker:
        path = worker.adapter("1", 1)
        with pytest.raises(ControlError, match=r"version 1 of adapter a was 0{64}; ") as raised:
            await worker.loras.load(load_lora("a", path, 1, digest="0" * 64), worker.report)
        assert raised.value.code is ControlCode.OTHER_CONTENT
        assert worker.links.versions.loras == {}


async def test_weights_with_the_recorded_digest_are_restored_from_the_recorded_source(tmp_path: Path) -> None:
    """A version that is recorded again from another directory does not need the first directory any more."""
    async with rig(tmp_path) as worker:
        path = worker.checkpoint("2", 2)
        await worker.weights.update(update(path, 2), worker.report)
        moved = path.rename(tmp_path / "moved")
        await worker.weights.update(update(moved, 2, digest=worker.weights.digest), worker.report)
        await worker.weights.restore(worker.report, 60.0)
        assert worker.standing == (2, False)


async def test_an_adapter_with_the_recorded_digest_is_reloaded_from_the_recorded_source(tmp_path: Path) -> None:
    """An adapter that is recorded again from another directory does not need the first directory any more."""
    async with rig(tmp_path) as worker:
        worker.engine.faults = SyntheticFaults(loses_loras=True)
        path = worker.adapter("1", 1)
        staged = await worker.stager.stage(StageKey(source(path), is_adapter=True))
        await worker.loras.load(load_lora("a", path, 1, digest=staged.digest), worker.report)
        moved = path.rename(tmp_path / "moved")
        worker.stages.clear()
        await worker.loras.load(load_lora("a", moved, 1, digest=staged.digest), worker.report)
        assert worker.stages == []
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        assert worker.loras.lost == {}
        assert worker.links.versions.loras == {"a": 1}
