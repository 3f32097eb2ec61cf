"""Objects of a stored folder are fetched once, verified, limited in size, and fetched at a limited rate."""

import base64
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.nats.connection import Connection
from rollbus.bus.objects.catalog import delete_prefix, ensure_bucket, list_objects, set_bucket_bytes
from rollbus.bus.objects.reader import BURST_S, FolderReader, ObjectReader, TokenBucket
from rollbus.bus.objects.writer import put_folder
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.workers.sources import store as folder_store
from tests.support.nats_server import opened
from tests.support.objects import (
    BUCKET_BYTES,
    complete,
    fetch_folder,
    files_in,
    fresh_bucket,
    partial,
    stored_messages,
    write_folder,
)

MEGABYTE = 1024 * 1024


async def put(nats: Connection, bucket: str, prefix: str, folder: Path) -> str:
    """Put a folder into a bucket of test size."""
    return await put_folder(nats, bucket, prefix, folder, max_bytes=BUCKET_BYTES)


async def test_a_folder_is_fetched_unchanged_and_only_once(nats_url: str, tmp_path: Path) -> None:
    """A folder with files of many chunks, of one chunk, and without data is fetched unchanged and only once."""
    source = write_folder(tmp_path / "source", a=3 * MEGABYTE + 1, empty=0, deep__er__b=10)
    stages: list[str] = []
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        objects = await put(nats, bucket, "model/step-1", source)

        first = await fetch_folder(nats_url, objects, tmp_path / "cache", stages.append)
        again = await fetch_folder(nats_url, objects, tmp_path / "cache", stages.append)

    assert objects == f"{bucket}/model/step-1"
    assert files_in(first) == files_in(source)
    assert (again, stages) == (first, ["fetching", "checking", "checking"])
    assert complete(tmp_path / "cache") == [first]


async def test_a_folder_that_a_crash_has_damaged_is_fetched_again(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was fetched before the machine started is used only if it is complete.

    Otherwise it is fetched again.
    """
    source = write_folder(tmp_path / "source", a=100, b=100, c=100)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        objects = await put(nats, bucket, "p", source)
        folder = await fetch_folder(nats_url, objects, tmp_path / "cache")
        spoils: list[tuple[str, Callable[[], object]]] = [
            ("2", (folder / "a").unlink),
            ("3", lambda: (folder / "b").write_bytes(bytes(100))),
            ("4", lambda: (folder / "c").write_bytes(b"")),
        ]
        for boot, spoil in spoils:
            monkeypatch.setattr(folder_store, "boot_id", lambda boot=boot: boot)
            spoil()
            stages: list[str] = []

            assert files_in(await fetch_folder(nats_url, objects, tmp_path / "cache", stages.append)) == files_in(
                source
            )
            assert stages == ["fetching", "checking"]


async def test_nats_py_reads_the_objects_of_rollbus(nats_url: str, tmp_path: Path) -> None:
    """The object store of nats-py finds and reads objects of rollbus, with size and digest."""
    source = write_folder(tmp_path / "source", a=2 * MEGABYTE + 1, b=10)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await put(nats, bucket, "step-1", source)
        store = await nats.jetstream().object_store(bucket)

        for name, content in files_in(source).items():
            result = await store.get(f"step-1/{name}")
            assert (result.data, result.info.size) == (content, len(content))
        assert sorted(info.name for info in await store.list()) == ["step-1/a", "step-1/b"]
        await store.delete("step-1/a")
        assert [info.name for info in await list_objects(nats, bucket)] == ["step-1/b"]


async def test_rollbus_reads_the_objects_of_nats_py(nats_url: str, tmp_path: Path) -> None:
    """A fetch returns the current objects that nats-py has put, replaced or deleted."""
    contents = {"a": os.urandom(MEGABYTE + 1), "b": b"new", "empty": b""}
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await ensure_bucket(nats, bucket, max_bytes=BUCKET_BYTES)
        store = await nats.jetstream().object_store(bucket)
        for name, content in {"b": b"old", "gone": b"x", **contents}.items():
            await store.put(f"p/{name}", content)
        await store.delete("p/gone")

        folder = await fetch_folder(nats_url, f"{bucket}/p", tmp_path / "cache")

    assert files_in(folder) == contents


async def test_deleting_a_folder_removes_all_its_chunks(nats_url: str, tmp_path: Path) -> None:
    """Deleting a folder removes all its chunks and descriptions.

    A folder whose name only has the same beginning stays.
    """
    source = write_folder(tmp_path / "source", a=MEGABYTE, b=10)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await put(nats, bucket, "step-10", source)
        before = await stored_messages(nats, bucket)
        await put(nats, bucket, "step-1", source)

        assert await delete_prefix(nats, f"{bucket}/step-1") == 2
        assert await stored_messages(nats, bucket) == before
        assert await delete_prefix(nats, f"{bucket}/step-1") == 0
        assert await delete_prefix(nats, "no-such-bucket/step-1") == 0


async def test_a_put_does_not_replace_stored_objects(nats_url: str, tmp_path: Path) -> None:
    """Putting a folder below a prefix that has objects fails and changes nothing."""
    source = write_folder(tmp_path / "source", a=10)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await put(nats, bucket, "p", source)
        before = await list_objects(nats, bucket)

        with pytest.raises(ControlError, match=f"objects:{bucket}/p exists; delete it first") as raised:
            await put(nats, bucket, "p", write_folder(tmp_path / "other", b=10))

        assert raised.value.code is ControlCode.STORAGE
        assert await list_objects(nats, bucket) == before


async def test_hidden_files_are_left_out(nats_url: str, tmp_path: Path) -> None:
    """Hidden files are not uploaded, because version control and editors create them.

    Files behind symlinks are uploaded.
    """
    source = write_folder(tmp_path / "source", a=10, **{".git__x": 1, ".swp": 1})
    (source / "link").symlink_to(source / "a")
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await put(nats, bucket, "p", source)

        assert [info.name for info in await list_objects(nats, bucket, "p")] == ["p/a", "p/link"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: os.mkfifo(folder / "b"), "/b is no regular file"),
        (lambda folder: (folder / "b").symlink_to("gone"), "/b cannot be read: No such file"),
        (lambda folder: (folder / "b\n").touch(), "allowed: a relative path"),
        (lambda folder: (folder / "a").unlink(), "has no files"),
        (lambda folder: ((folder / "a").unlink(), folder.rmdir()), "source cannot be read: No such file"),
    ],
)
async def test_a_folder_that_cannot_be_read_leaves_nothing(
    nats_url: str, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    """The error names a file that cannot be read or has a forbidden name.

    The chunks that were stored before are removed.
    """
    spoil(write_folder(tmp_path / "source", a=MEGABYTE))
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await ensure_bucket(nats, bucket, max_bytes=BUCKET_BYTES)

        with pytest.raises(ControlError) as raised:
            await put(nats, bucket, "p", tmp_path / "source")

        assert raised.value.code is ControlCode.BAD_SOURCE
        assert said in raised.value.message
        assert await stored_messages(nats, bucket) == 0


async def test_a_full_bucket_is_an_error_and_leaves_nothing(nats_url: str, tmp_path: Path) -> None:
    """A put that does not fit fails with the reason and removes its chunks. Earlier objects stay."""
    source = write_folder(tmp_path / "source", a=3 * MEGABYTE)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await put_folder(nats, bucket, "small", write_folder(tmp_path / "small", a=10), max_bytes=2 * MEGABYTE)

        with pytest.raises(ControlError, match="the bucket rejected the upload: maximum bytes exceeded") as raised:
            await put(nats, bucket, "large", source)

        assert raised.value.code is ControlCode.STORAGE
        assert [info.name for info in await list_objects(nats, bucket)] == ["small/a"]
        assert await stored_messages(nats, bucket) == 2


@pytest.mark.parametrize(
    "objects", ["bucket", "bucket/", "/p", "b.b/p", "bucket/../p", "bucket//p", "bucket/p/", "*/p"]
)
async def test_a_source_must_be_bucket_and_prefix(objects: str) -> None:
    """A source that is not a bucket and a prefix is rejected before the server is contacted."""
    with pytest.raises(ControlError) as raised:
        async with ObjectReader("nats://127.0.0.1:1", name="test").open_folder(objects):
            pytest.fail("it is open")

    assert raised.value.code is ControlCode.BAD_SOURCE


async def test_a_source_without_objects_is_refused(nats_url: str, tmp_path: Path) -> None:
    """The error for a missing bucket or an empty prefix names both."""
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        for _ in range(2):
            with pytest.raises(ControlError, match=f"the bucket '{bucket}' has no objects below 'p'") as raised:
                await fetch_folder(nats_url, f"{bucket}/p", tmp_path / "cache")
            assert raised.value.code is ControlCode.BAD_SOURCE
            await ensure_bucket(nats, bucket, max_bytes=BUCKET_BYTES)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a//b", "a\\..\\b", "a/.", "good/b/c"])
async def test_a_name_that_leads_out_of_the_folder_is_refused(nats_url: str, tmp_path: Path, name: str) -> None:
    """An object name that leads out of the folder or below a file is rejected, and nothing of the folder is written."""
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await ensure_bucket(nats, bucket, max_bytes=BUCKET_BYTES)
        store = await nats.jetstream().object_store(bucket)
        await store.put("p/good", b"good")
        await store.put(f"p/{name}", b"evil")

        with pytest.raises(ControlError, match="allowed: a relative path") as raised:
            await fetch_folder(nats_url, f"{bucket}/p", tmp_path / "cache")

    assert raised.value.code is ControlCode.BAD_SOURCE
    assert files_in(tmp_path) == {}


async def error_of_damaged_object(nats_url: str, tmp_path: Path, parts: bytes | None, info: dict[str, object]) -> str:
    """Return the error of an object whose chunks or description were replaced, and check that nothing remains."""
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        await put(nats, bucket, "p", write_folder(tmp_path / "source", a=100))
        (stored,) = await list_objects(nats, bucket)
        jetstream = nats.jetstream()
        if parts is not None:
            await jetstream.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.C.{stored.nuid}")
            if parts:
                await jetstream.publish(f"$O.{bucket}.C.{stored.nuid}", parts)
        subject = f"$O.{bucket}.M.{base64.urlsafe_b64encode(b'p/a').decode()}"
        described = {name: getattr(stored, name) for name in ("name", "bucket", "nuid", "size", "chunks", "digest")}
        await jetstream.publish(subject, json.dumps(described | info).encode(), headers={"Nats-Rollup": "sub"})

        with pytest.raises(ControlError) as raised:
            await fetch_folder(nats_url, f"{bucket}/p", tmp_path / "cache")

    assert raised.value.code is ControlCode.BAD_SOURCE
    assert complete(tmp_path / "cache") == partial(tmp_path / "cache") == []
    return raised.value.message


@pytest.mark.parametrize(
    ("parts", "info", "said"),
    [
        (bytes(100), {}, "p/a is damaged: its SHA-256 is"),
        (bytes(100), {"options": {"max_chunk_size": 2**63}}, "p/a is damaged"),
        (bytes(99), {}, "has 99 bytes in 1 of 1 parts; its description says 100"),
        (bytes(101), {}, "has 101 bytes"),
        (b"", {}, "has 0 more parts, expected 1"),
        (None, {"chunks": 2}, "has 1 more parts, expected 2"),
        (None, {"digest": "MD5=abc"}, "has no SHA-256, but the digest 'MD5=abc'"),
        (None, {"digest": "SHA-256=abc"}, "has no SHA-256"),
        (None, {"size": -1}, "contradicts itself"),
        (None, {"chunks": 101}, "contradicts itself"),
        (None, {"nuid": "a.>"}, "contradicts itself"),
        (None, {"name": "p/b"}, "describes itself as"),
        (None, {"size": "x"}, "does not decode"),
        (None, {"options": {"link": {"bucket": "other"}}}, "is a link"),
    ],
)
async def test_an_object_with_wrong_content_is_refused(
    nats_url: str, tmp_path: Path, parts: bytes | None, info: dict[str, object], said: str
) -> None:
    """The error names content that does not match its description and an invalid description, and nothing remains."""
    assert said in await error_of_damaged_object(nats_url, tmp_path, parts, info)


async def test_a_bucket_size_below_the_stored_bytes_is_refused(nats_url: str, tmp_path: Path) -> None:
    """`set_bucket_bytes` creates a missing bucket and keeps its objects. It rejects a size below the stored bytes."""
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        changes = [await set_bucket_bytes(nats, bucket, 2 * MEGABYTE) for _ in range(2)]
        assert changes == ["created", "unchanged"]
        await put(nats, bucket, "p", write_folder(tmp_path / "p", a=MEGABYTE))
        with pytest.raises(ControlError, match=r"rejected the upload"):
            await put(nats, bucket, "q", write_folder(tmp_path / "q", a=MEGABYTE))
        assert await set_bucket_bytes(nats, bucket, 3 * MEGABYTE) == "resized"
        await put(nats, bucket, "q", tmp_path / "q")
        with pytest.raises(ControlError, match=rf"holds \d+ bytes; it cannot have {MEGABYTE}") as raised:
            await set_bucket_bytes(nats, bucket, MEGABYTE)
        assert raised.value.code is ControlCode.STORAGE
        assert len(await list_objects(nats, bucket)) == 2


# Objects of a stored folder are fetched once, verified, limited in size, and fetched at a limited rate.


async def fetch(folder: FolderReader, name: str, into: Path) -> int:
    """Fetch an object and return the number of received bytes."""
    came: list[int] = []
    await folder.fetch(name, into, came.append)
    return sum(came)


async def test_an_object_is_fetched_into_a_file_once(nats_url: str, tmp_path: Path) -> None:
    """A file with the right size and content is not fetched again.

    A partial file, other content and a link are replaced.
    """
    source = write_folder(tmp_path / "source", a=3 * MEGABYTE + 1, deep__b=0)
    into, elsewhere = tmp_path / "into" / "a", tmp_path / "elsewhere"
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)
        async with ObjectReader(nats_url, name="test").open_folder(objects) as folder:
            assert {path: info.size for path, info in folder.names.items()} == {"a": 3 * MEGABYTE + 1, "deep/b": 0}
            assert await fetch(folder, "a", into) == 3 * MEGABYTE + 1
            assert await fetch(folder, "a", into) == 0
            assert await fetch(folder, "deep/b", tmp_path / "into" / "deep" / "b") == 0
            assert files_in(tmp_path / "into") == files_in(source)

            for spoilt in (into.read_bytes()[:-1], bytes(3 * MEGABYTE + 1)):
                into.write_bytes(spoilt)
                assert await fetch(folder, "a", into) == 3 * MEGABYTE + 1
                assert files_in(tmp_path / "into") == files_in(source)
            into.unlink()
            elsewhere.write_bytes(b"not ours")
            into.symlink_to(elsewhere)
            await fetch(folder, "a", into)

    assert files_in(tmp_path / "into") == files_in(source)
    assert elsewhere.read_bytes() == b"not ours"


async def test_an_object_is_read_into_memory_up_to_a_bound(nats_url: str, tmp_path: Path) -> None:
    """Reading an object above the size limit and reading a missing object raise an error."""
    source = write_folder(tmp_path / "source", a=MEGABYTE + 1, empty=0)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)
        async with ObjectReader(nats_url, name="test").open_folder(objects) as folder:
            assert await folder.read("a", MEGABYTE + 1) == (source / "a").read_bytes()
            assert await folder.read("empty", 0) == b""
            with pytest.raises(ControlError, match=f"p/a has {MEGABYTE + 1} bytes; allowed: at most {MEGABYTE}") as one:
                await folder.read("a", MEGABYTE)
            with pytest.raises(ControlError, match="has no object 'b'") as two:
                await folder.read("b", MEGABYTE)
            with pytest.raises(ControlError, match=r"has no object '\.\./a'") as three:
                await folder.fetch("../a", tmp_path / "x", print)

    assert {one.value.code, two.value.code, three.value.code} == {ControlCode.BAD_SOURCE}


async def test_a_damaged_object_is_refused(nats_url: str, tmp_path: Path) -> None:
    """An object whose chunks do not match its description is neither read nor fetched."""
    source = write_folder(tmp_path / "source", a=100)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)
        async with ObjectReader(nats_url, name="test").open_folder(objects) as folder:
            nuid = folder.names["a"].nuid
            await nats.jetstream().purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.C.{nuid}")
            await nats.jetstream().publish(f"$O.{bucket}.C.{nuid}", os.urandom(100))
            for attempt in (folder.read("a", 100), folder.fetch("a", tmp_path / "a", lambda _: None)):
                with pytest.raises(ControlError, match="p/a is damaged: its SHA-256 is") as raised:
                    await attempt
                assert raised.value.code is ControlCode.BAD_SOURCE


async def test_all_fetches_of_a_reader_share_the_rate(nats_url: str, tmp_path: Path) -> None:
    """All fetches of a reader share one rate: two objects take the time of their total bytes, less one burst."""
    rate = 8 * MEGABYTE
    source = write_folder(tmp_path / "source", a=4 * MEGABYTE, b=4 * MEGABYTE)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)
        reader = ObjectReader(nats_url, name="test", fetch_rate=rate)
        started = time.monotonic()
        for name in ("a", "b"):
            async with reader.open_folder(objects) as folder:
                await fetch(folder, name, tmp_path / "into" / name)
        took = time.monotonic() - started

    assert took >= 1.0 - BURST_S - 0.01
    assert files_in(tmp_path / "into") == files_in(source)


@given(st.integers(1, 10**9), st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 2)), min_size=1, max_size=50))
def test_a_token_bucket_keeps_its_rate(rate: int, steps: list[tuple[int, float]]) -> None:
    """With any pauses of its users, a token bucket lets at most its rate and one burst pass."""
    now = 0.0
    bucket = TokenBucket(rate, now)
    passed = 0
    for num_bytes, rest in steps:
        now += rest
        wait = bucket.spend(num_bytes, now)
        passed += num_bytes
        now += wait
        assert passed <= rate * (now + BURST_S) * (1 + 1e-9) + 1


def test_a_token_bucket_lets_small_transfers_pass() -> None:
    """Transfers below the rate never wait."""
    bucket = TokenBucket(1000, 0.0)
    assert all(bucket.spend(100, now / 10) == 0 for now in range(100))
    assert bucket.spend(1000, 9.9) > 0


async def test_only_the_thread_that_hashes_and_writes_lowers_its_priority(nats_url: str, tmp_path: Path) -> None:
    """Only the thread that hashes and writes lowers its priority.

    The event loop keeps its priority, because it forwards tokens.
    """
    source = write_folder(tmp_path / "source", a=1)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)
        for nice in (0, 10):
            async with ObjectReader(nats_url, name="test", nice=nice).open_folder(objects) as folder:
                own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
                disk = await folder.run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
                assert disk == max(own, nice)
