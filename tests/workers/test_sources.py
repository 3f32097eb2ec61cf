import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbus.bus.objects import safetensors_header
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources.content import Tensor, read_header
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import MODEL, ignore, write_checkpoint, write_safetensors, write_sharded

NORM: Final = "model.norm.weight"


def sources(tmp_path: Path, *, own: Path | None = None, roots: tuple[Path, ...] | None = None) -> WeightSources:
    """Return sources that allow `tmp_path / "root"`."""
    allowed = (tmp_path / "root",) if roots is None else roots
    return WeightSources(roots=allowed, own=own, cache=tmp_path / "cache", model="m", worker="w1", objects=None)


async def refusal(checked: WeightSources, path: Path | str) -> ControlError:
    """Return the error for a checkpoint that must be rejected."""
    with pytest.raises(ControlError) as raised:
        await checked.checkpoint(WeightSource(path=str(path)), ignore)
    return raised.value


async def test_a_valid_checkpoint_is_accepted_with_its_real_path(tmp_path: Path) -> None:
    """A folder with the tensors of the worker's checkpoint is accepted, in one file or in shards.

    The path may contain symlinks and `..`.
    """
    own = write_checkpoint(tmp_path / "own")
    single = write_checkpoint(tmp_path / "root" / "step-1", fill=1)
    sharded = write_sharded(tmp_path / "root" / "step-2")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    checked = sources(tmp_path, own=own)
    stages: list[str] = []

    for named, real in (
        (str(single), single),
        (f"{tmp_path}/root/step-2/../step-1", single),
        (f"{tmp_path}/link/step-2", sharded),
    ):
        assert await checked.checkpoint(WeightSource(path=named), stages.append) == real
    # Files that were read ahead once are in memory.
    assert stages == ["checking", "reading", "checking", "checking", "reading"]


async def test_a_root_may_be_a_symlink(tmp_path: Path) -> None:
    """Roots are compared by their real paths too."""
    real = write_checkpoint(tmp_path / "disk" / "step-1")
    (tmp_path / "root").symlink_to(tmp_path / "disk")

    assert await sources(tmp_path).checkpoint(WeightSource(path=f"{tmp_path}/root/step-1"), ignore) == real


async def test_without_roots_every_path_is_refused(tmp_path: Path) -> None:
    """Without roots, every path is rejected, and the error states how to allow a path."""
    error = await refusal(sources(tmp_path, roots=()), write_checkpoint(tmp_path / "step-1"))

    assert error.code is ControlCode.PATH_REFUSED
    assert "--weight-root DIR" in error.message


@pytest.mark.parametrize("path", ["{tmp}/outside", "{tmp}/root/../outside", "{tmp}/root/link", "{tmp}/root-2", "/"])
async def test_a_path_that_leads_out_of_the_roots_is_refused(tmp_path: Path, path: str) -> None:
    """A path may leave a root by symlinks, by `..` or by a name that only begins like a root.

    The error states the roots and how to allow a path.
    """
    outside = write_checkpoint(tmp_path / "outside")
    write_checkpoint(tmp_path / "root-2")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(outside)

    error = await refusal(sources(tmp_path), path.format(tmp=tmp_path))

    assert error.code is ControlCode.PATH_REFUSED
    assert error.message.startswith(f"{path.format(tmp=tmp_path)} is outside the worker's directories of weights")
    assert f"allowed: {tmp_path}/root;" in error.message
    assert "--weight-root" in error.message


@pytest.mark.parametrize("path", ["root/step-1", "", "/tmp/\0"])
async def test_a_path_must_be_absolute(tmp_path: Path, path: str) -> None:
    """A path must be absolute, so that its meaning does not depend on the worker's start folder."""
    assert (await refusal(sources(tmp_path), path)).code is ControlCode.PATH_REFUSED


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "deep/er.txt"])
async def test_a_file_that_leads_out_of_the_roots_is_refused(tmp_path: Path, name: str) -> None:
    """The real path of every file must be below a root, because the engine follows symlinks."""
    folder = write_checkpoint(tmp_path / "root" / "step-1")
    secret = tmp_path / "secret"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    write_safetensors(secret, MODEL)
    (folder / name).symlink_to(secret)

    error = await refusal(sources(tmp_path), folder)

    assert error.code is ControlCode.PATH_REFUSED
    assert str(folder / name) in error.message
    assert str(secret) not in error.message


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
async def test_errors_do_not_reveal_the_targets_of_symlinks(tmp_path: Path, name: str) -> None:
    """Errors do not reveal the targets of symlinks, also of roots: clients need not know the worker's disks."""
    disk = tmp_path / "disk"
    real = write_checkpoint(disk / "real")
    (tmp_path / "root").symlink_to(disk)
    (disk / "link").symlink_to(real)
    (tmp_path / "out").mkdir()
    (disk / "exit").symlink_to(tmp_path / "out")
    (real / name).unlink()
    (real / name).symlink_to(tmp_path / "out" / "secret")
    given = f"{tmp_path}/root/link"

    texts = [
        (await refusal(sources(tmp_path), given)).message,
        (await refusal(sources(tmp_path), f"{tmp_path}/root/exit")).message,
    ]
    (real / name).unlink()
    (real / name).symlink_to("nothing")
    texts.append((await refusal(sources(tmp_path), given)).message)

    assert f"{given}/{name}" in texts[0]
    assert f"{given}/{name}" in texts[2]
    for text in texts:
        assert [hidden for hidden in ("disk", "real", "/out") if hidden in text] == []


async def test_symlinks_within_the_roots_are_accepted(tmp_path: Path) -> None:
    """Files that are symlinks to blobs beside their folder are accepted, because such checkpoints are common."""
    folder = write_checkpoint(tmp_path / "root" / "snapshot")
    blobs = tmp_path / "root" / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "abc")
    (folder / "model.safetensors").symlink_to("../blobs/abc")

    assert await sources(tmp_path, own=folder).checkpoint(WeightSource(path=str(folder)), ignore) == folder


def delete(name: str) -> Callable[[Path], None]:
    """Return a change that deletes a file."""
    return lambda folder: (folder / name).unlink()


def write(name: str, data: bytes) -> Callable[[Path], object]:
    """Return a change that writes a file."""
    return lambda folder: (folder / name).write_bytes(data)


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a change that replaces a file by another kind of file."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def cut(name: str) -> Callable[[Path], None]:
    """Return a change that removes the last byte."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1)


SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (delete(SHARD), f"{SHARD} is missing: the index names it"),
        (cut(SHARD), f"{SHARD} is truncated: the tensor '{NORM}' ends at byte 112 of the data, and there are 111"),
        (write(SHARD, b""), f"{SHARD} is truncated or no safetensors file: 0 bytes, with a header of 0"),
        (write(SHARD, b"\x00" * 7), f"{SHARD} is truncated or no safetensors file: 7 bytes"),
        (write(SHARD, b"\xff" * 64), f"{SHARD} is truncated or no safetensors file: 64 bytes, with a header of 184"),
        (write(SHARD, b"\x08" + b"\0" * 7 + b"garbage!"), f"{SHARD} is no safetensors file: its header does not"),
        (write(INDEX, b"{"), f"{INDEX} does not decode"),
        (write(INDEX, b'{"weight_map": {"a": "../own/model.safetensors"}}'), "has 'a' in '../own/model.safetensors'"),
        (write(INDEX, b'{"weight_map": {}}'), "has no tensors"),
        (delete(INDEX), f"has 2 safetensors files and no {INDEX}"),
        (replace(SHARD, os.mkfifo), f"{SHARD} is no regular file"),
        (replace(SHARD, os.mkdir), f"{SHARD} is no regular file"),
        (replace(SHARD, lambda path: path.symlink_to("gone")), f"{SHARD} does not exist"),
        (replace("config.json", os.mkfifo), "config.json is no regular file"),
    ],
)
async def test_a_damaged_checkpoint_is_refused(tmp_path: Path, change: Callable[[Path], object], said: str) -> None:
    """A missing, truncated or wrong file is named with the expected content, and the check never hangs."""
    folder = write_sharded(write_checkpoint(tmp_path / "root" / "step-1"))
    (folder / "model.safetensors").unlink()
    change(folder)

    error = await refusal(sources(tmp_path, own=write_checkpoint(tmp_path / "own")), folder)

    assert error.code is ControlCode.BAD_SOURCE
    assert said in error.message


@pytest.mark.proves("P22")
@pytest.mark.parametrize(
    ("shapes", "dtype", "said"),
    [
        ({name: MODEL[name] for name in list(MODEL)[:3]}, "F32", f"lacks the tensor '{NORM}': it is of another model"),
        (MODEL | {"extra": (1,)}, "F32", "has the tensor 'extra', which the worker's model does not have"),
        (MODEL | {NORM: (5,)}, "F32", f"model.safetensors has the tensor '{NORM}' as F32[5]; expected: F32[4]"),
        (MODEL | {NORM: (4, 1)}, "F32", "as F32[4, 1]; expected: F32[4]"),
        (MODEL, "BF16", "as BF16[16, 4]; expected: F32[16, 4], as the worker's model"),
    ],
)
async def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, said: str
) -> None:
    """A checkpoint must have exactly the tensors of the worker's checkpoint, with the same shapes and dtypes."""
    folder = write_checkpoint(tmp_path / "root" / "step-1", shapes, dtype=dtype)
    own = write_checkpoint(tmp_path / "own")

    error = await refusal(sources(tmp_path, own=own), folder)

    assert error.code is ControlCode.BAD_SOURCE
    assert said in error.message
    # Without a checkpoint of the worker, only the consistency of the folder is checked.
    assert await sources(tmp_path).checkpoint(WeightSource(path=str(folder)), ignore) == folder


async def test_settings_that_only_a_fresh_start_applies_must_be_equal(tmp_path: Path) -> None:
    """Settings that only a fresh start would apply must be equal. Settings without effect may differ."""
    own = write_checkpoint(tmp_path / "own")
    folder = write_checkpoint(tmp_path / "root" / "step-1")
    config = {"model_type": "none", "transformers_version": "5", "rope_theta": 10000}
    (folder / "config.json").write_text(json.dumps(config))
    checked = sources(tmp_path, own=own)
    assert await checked.checkpoint(WeightSource(path=str(folder)), ignore) == folder

    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6}))

    assert "has rope_theta=1000000.0; expected: 10000.0" in (await refusal(checked, folder)).message


async def test_a_worker_reads_its_own_checkpoint_once(tmp_path: Path) -> None:
    """The worker reads its own checkpoint once, because its engine keeps the weights if the files change."""
    own = write_checkpoint(tmp_path / "own")
    folder = write_checkpoint(tmp_path / "root" / "step-1")
    checked = sources(tmp_path, own=own)
    await checked.checkpoint(WeightSource(path=str(folder)), ignore)
    write_checkpoint(own, {"other": (1,)})

    assert await checked.checkpoint(WeightSource(path=str(folder)), ignore) == folder


async def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable file is named with the operating system's message."""
    folder = write_checkpoint(tmp_path / "root" / "step-1")
    checked = sources(tmp_path)

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)

    assert "model.safetensors cannot be read: Permission denied" in (await refusal(checked, folder)).message


async def test_a_file_or_a_missing_folder_is_rejected_by_name(tmp_path: Path) -> None:
    """A file or a missing folder is rejected, and the error states the reason."""
    folder = write_checkpoint(tmp_path / "root" / "step-1")
    checked = sources(tmp_path)

    assert "is not a directory" in (await refusal(checked, folder / "config.json")).message
    assert "step-9 does not exist on the worker's machine" in (await refusal(checked, tmp_path / "root/step-9")).message
    assert (await refusal(checked, "/nope")).message == "/nope does not exist on the worker's machine"
    (folder / "model.safetensors").unlink()
    assert "has no safetensors file" in (await refusal(checked, folder)).message


async def test_a_worker_without_an_object_store_rejects_sources_in_the_store(tmp_path: Path) -> None:
    """A worker without an object store rejects sources in the store, and the error names the source."""
    with pytest.raises(ControlError, match="objects:bucket/step-1 is refused: this worker reads no object store"):
        await sources(tmp_path).checkpoint(WeightSource(objects="bucket/step-1"), ignore)


def write_of_sources_headers(path: Path, header: object, data: bytes = b"") -> Path:
    """Write a file with this header and data."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32", **more: object) -> dict[str, object]:
    """Return the header entry of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def test_a_header_gives_dtypes_and_shapes(tmp_path: Path) -> None:
    """Names, dtypes and shapes are as written, in any order. Metadata are no tensors."""
    header = {"__metadata__": {"format": "pt"}, "b": entry(8, 12, [2], "BF16"), "a": entry(0, 8, [1, 2])}
    path = write_of_sources_headers(tmp_path / "x", header | {"c": entry(12, 12, [0, 5])}, bytes(12))

    begin = path.stat().st_size - 12
    assert read_header(path) == {
        "a": Tensor("F32", (1, 2), path, begin),
        "b": Tensor("BF16", (2,), path, begin + 8),
        "c": Tensor("F32", (0, 5), path, begin + 12),
    }


@pytest.mark.parametrize(
    ("header", "size", "said"),
    [
        ({"a": entry(0, 4, [1], "F33")}, 4, "of the unknown dtype 'F33'"),
        ({"a": entry(0, 8, [1])}, 8, "has the tensor 'a' at bytes 0 to 8; expected: from 0 on, and 4 bytes for F32[1]"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, 12, "'b' at bytes 8 to 12; expected: from 4 on"),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, 4, "expected: from 4 on"),
        ({"a": entry(4, 0, [1])}, 4, "expected: from 0 on"),
        ({"a": entry(0, 4, [1])}, 3, "is truncated: the tensor 'a' ends at byte 4 of the data, and there are 3"),
        ({"a": entry(0, 4, [1])}, 5, "has 5 bytes of data; its tensors have 4"),
        ({"a": entry(0, 2**70, [2**68])}, 4, "is truncated"),
        ({"a": entry(0, 2**62, [2**31, 2**29])}, 4, "is truncated"),
        ({"a": entry(-4, 0, [1])}, 4, "does not decode"),
        ({"a": entry(0, 4, [1] * 17)}, 4, "does not decode"),
        ({"a": entry(0, 4, [1], other=1)}, 4, "does not decode"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "does not decode"),
        ({"a": 1}, 4, "does not decode"),
        ([], 4, "does not decode"),
        (b"[" * 100_000, 0, "does not decode"),
        (b'{"\xff": 1}', 0, "does not decode"),
        (b"", 0, "does not decode"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, header: Any, size: int, said: str) -> None:
    """A header with holes, overlaps or wrong sizes is rejected, and so is content that is no header."""
    with pytest.raises(ControlError) as raised:
        read_header(write_of_sources_headers(tmp_path / "x", header, bytes(size)))

    assert raised.value.code is ControlCode.BAD_SOURCE
    assert said in raised.value.message
    assert len(raised.value.message) < 1000


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    """The length of a header is checked against a maximum before it is used, also in a sparse file of that size."""
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write((99_000_000).to_bytes(8, "little"))
        file.truncate(2**41)

    with pytest.raises(ControlError, match="has a header of 99000000 bytes; allowed: 33554432"):
        read_header(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.data())
def test_a_damaged_file_gives_a_header_or_a_control_error(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes are changed or removed, the result is a header or a `ControlError`."""
    content = bytearray(write_safetensors(tmp_path / "x", MODEL).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    is_cut = data.draw(st.booleans())
    if is_cut:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (tmp_path / "x").write_bytes(content)

    try:
        header = read_header(tmp_path / "x")
    except ControlError as error:
        assert error.code is ControlCode.BAD_SOURCE
    else:
        assert not is_cut
        assert len(header) <= len(MODEL) + 1


def refused(path: Path) -> str:
    """Return why the header of a file is refused."""
    with pytest.raises(ControlError) as caught:
        read_header(path)
    assert caught.value.code is ControlCode.BAD_SOURCE
    return caught.value.message


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            b"{" + b",".join(b'"%x":0' % i for i in range(1000)) + b"}",
            "has a header with 1000 colons; allowed: 25, for 5",
        ),
        (b"{" + b",".join(b'"%x":0' % i for i in range(6)) + b"}", "has 6 tensors; allowed: 5 in one file"),
    ],
)
def test_the_number_of_tensors_in_a_file_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes, said: str
) -> None:
    """A header with too many tensors is refused, and one with far too many keys is not decoded at all."""
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 5)
    monkeypatch.setattr(safetensors_header, "MAX_COLONS", 25)

    assert said in refused(write_of_sources_headers(tmp_path / "x", header))
