"""The object store with a full disk, lost messages, and a server or a process that dies."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from nats.js.api import ObjectMeta, ObjectMetaOptions

from rollbus.bus.nats import jetstream
from rollbus.bus.nats.connection import subscribe
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.objects import reader, writer
from rollbus.bus.objects.catalog import ensure_bucket, list_objects
from rollbus.bus.objects.reader import NewFile
from rollbus.bus.objects.writer import put_folder
from rollbus.schemas.errors import BusBroken, ControlCode, ControlError
from tests.support.nats_server import NatsNoise, count_tasks, opened, require_binary
from tests.support.objects import (
    BUCKET_BYTES,
    complete,
    fetch_folder,
    files_in,
    fresh_bucket,
    open_files,
    partial,
    stored_messages,
    write_folder,
)
from tests.support.tcp_proxy import TcpProxy, tcp_proxy

pytestmark = pytest.mark.slow

MEGABYTE = 1024 * 1024


@contextlib.asynccontextmanager
async def stored(size: int, tmp_path: Path) -> AsyncIterator[tuple[EmbeddedServer, TcpProxy, Path]]:
    """Start a separate server with the folder `bucket/p`, one file of `size` bytes, and a proxy in front of it."""
    require_binary()
    source = write_folder(tmp_path / "source", a=size)
    async with EmbeddedServer() as server, tcp_proxy(server.url) as proxy:
        async with opened(server.url) as nats:
            await put_folder(nats, "bucket", "p", source, max_bytes=BUCKET_BYTES)
        yield server, proxy, source


def after(proxy: TcpProxy, size: int, event: asyncio.Event) -> None:
    """Set `event` when clients have received `size` bytes. The proxy sends 40 MB/s, so that more bytes remain."""

    def watch() -> Callable[[bytes], bytes]:
        passed = 0

        def count(data: bytes) -> bytes:
            nonlocal passed
            passed += len(data)
            if passed > size:
                event.set()
            return data

        return count

    proxy.make_filter = watch
    proxy.bytes_per_s = 40 * MEGABYTE


async def test_a_fetch_continues_after_the_server_was_killed_and_restarted(tmp_path: Path) -> None:
    """After the server was killed and restarted, a fetch continues at its position and completes."""
    event = asyncio.Event()
    async with stored(24 * MEGABYTE, tmp_path) as (server, proxy, source), asyncio.TaskGroup() as tasks:
        after(proxy, 8 * MEGABYTE, event)
        fetch = fetch_folder(proxy.url, "bucket/p", tmp_path / "cache")
        task = tasks.create_task(fetch)
        await event.wait()
        await server.kill()
        assert not task.done()
        await server.restart()

        assert files_in(await task) == files_in(source)


async def test_a_fetch_without_data_for_a_while_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data for a while, a fetch fails and states its progress.

    No folder counts as complete, and no lock is held.
    """
    monkeypatch.setattr(reader, "STALL_S", 0.1)
    monkeypatch.setattr(jetstream, "API_TIMEOUT_S", 1.0)
    event = asyncio.Event()
    async with stored(24 * MEGABYTE, tmp_path) as (server, proxy, _), asyncio.TaskGroup() as tasks:
        after(proxy, 8 * MEGABYTE, event)

        async def fetch() -> ControlError:
            with pytest.raises(ControlError) as raised:
                await fetch_folder(proxy.url, "bucket/p", tmp_path / "cache")
            return raised.value

        task = tasks.create_task(fetch())
        await event.wait()
        await server.kill()
        error = await task

    assert error.code is ControlCode.STORAGE
    assert "objects:bucket/p/a stopped for" in error.message
    assert "of 48 parts" in error.message
    assert complete(tmp_path / "cache") == open_files(tmp_path / "cache") == []


async def test_a_fetch_without_a_server_is_an_error_with_its_address(tmp_path: Path) -> None:
    """The error names the address of a server that does not answer."""
    with pytest.raises(ControlError, match="objects:bucket/p cannot be fetched: no NATS server") as raised:
        await fetch_folder("nats://127.0.0.1:1", "bucket/p", tmp_path / "cache")

    assert raised.value.code is ControlCode.STORAGE


async def test_lost_messages_are_fetched_again(nats_url: str, tmp_path: Path) -> None:
    """Messages that are lost, duplicate or late do not change the fetched content."""
    content = os.urandom(2 * MEGABYTE)
    noise = NatsNoise(r"^_INBOX\.[^.]+$", seed=1, drop=0.02, double=0.01, delay=0.01)
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket, tcp_proxy(nats_url) as proxy:
        await ensure_bucket(nats, bucket, max_bytes=BUCKET_BYTES)
        store = await nats.jetstream().object_store(bucket)
        for start in range(0, len(content), MEGABYTE // 2):
            await store.put(f"p/{start}", content[start : start + MEGABYTE // 2], meta=small_parts(f"p/{start}"))
        proxy.make_filter = noise.filter

        folder = await fetch_folder(proxy.url, f"{bucket}/p", tmp_path / "cache")

    assert noise.counts["dropped"] > 0
    assert (
        b"".join(fetched for _, fetched in sorted(files_in(folder).items(), key=lambda file: int(file[0]))) == content
    )


def small_parts(name: str) -> ObjectMeta:
    """Return the options by which nats-py splits an object into chunks of 8 KB."""
    return ObjectMeta(name=name, options=ObjectMetaOptions(max_chunk_size=8192))


async def test_a_fetch_or_put_that_is_cancelled_at_any_moment_leaves_nothing(nats_url: str, tmp_path: Path) -> None:
    """A fetch or put that is cancelled at any moment leaves no open file, incomplete folder, task or message."""
    cache = tmp_path / "cache"
    source = write_folder(tmp_path / "source", a=MEGABYTE + 1, b=10)

    async def is_cancelled(operation: Coroutine[None, None, object], turns: int) -> bool:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(operation)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        return task.cancelled()

    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)
        messages, before = await stored_messages(nats, bucket), await count_tasks()
        cancelled = 0
        for turns in range(0, 200, 5):
            cancelled += await is_cancelled(fetch_folder(nats_url, objects, cache), turns)
            assert open_files(cache) == []
            assert all(files_in(folder) == files_in(source) for folder in complete(cache))
            shutil.rmtree(cache, ignore_errors=True)
            is_put_cancelled = await is_cancelled(put_folder(nats, bucket, f"put-{turns}", source), turns)
            cancelled += is_put_cancelled
            if is_put_cancelled:
                assert await stored_messages(nats, bucket) == messages
            messages = await stored_messages(nats, bucket)
            assert await count_tasks() == before

    assert cancelled > 20


async def test_a_killed_fetch_leaves_no_folder_that_counts_as_complete(tmp_path: Path) -> None:
    """A killed fetch leaves a hidden and unlocked folder, and the next fetch completes."""
    program = (
        "import asyncio, sys; from pathlib import Path; from tests.support.objects import fetch_folder\n"
        "asyncio.run(fetch_folder(sys.argv[1], 'bucket/p', Path(sys.argv[2])))"
    )
    event = asyncio.Event()
    cache = tmp_path / "cache"
    async with stored(24 * MEGABYTE, tmp_path) as (server, proxy, source):
        after(proxy, 8 * MEGABYTE, event)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, proxy.url, str(cache), cwd=Path(__file__).parents[2]
        )
        await event.wait()
        process.kill()
        assert await process.wait() == -signal.SIGKILL

        assert complete(cache) == []
        assert len(partial(cache)) == 1
        folder = await fetch_folder(server.url, "bucket/p", cache)
        assert files_in(folder) == files_in(source)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("is_room_known", [True, False])
async def test_a_full_disk_is_an_error_and_leaves_nothing(
    nats_url: str, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, *, is_room_known: bool
) -> None:
    """A folder that does not fit on the disk fails before the fetch.

    If other data fill the disk meanwhile, the fetch fails.
    """
    cache = small_disk / "cache"
    said = f"{3 * MEGABYTE} bytes do not fit on the disk of {cache}: it has "
    if not is_room_known:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 0, 2**40))
        said = f"cannot be written to {small_disk}/"
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        source = write_folder(tmp_path / "source", a=3 * MEGABYTE)
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)

        with pytest.raises(ControlError) as raised:
            await fetch_folder(nats_url, objects, cache)

    assert raised.value.code is ControlCode.STORAGE
    assert said in raised.value.message
    assert [name for name, data in files_in(small_disk).items() if data and not name.endswith(".lock")] == []


@pytest.mark.parametrize(("error", "is_kept"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)])
async def test_a_failing_write_is_an_error(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, *, is_kept: bool
) -> None:
    """A write error is passed on, and the next fetch completes. On a full disk, the partial data are removed."""

    def fail(file: object, data: list[bytes]) -> None:
        raise OSError(error, os.strerror(error))

    cache = tmp_path / "cache"
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        source = write_folder(tmp_path / "source", a=10)
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)
        with monkeypatch.context() as patch:
            patch.setattr(NewFile, "write", fail)
            with pytest.raises(ControlError, match=os.strerror(error)) as raised:
                await fetch_folder(nats_url, objects, cache)
        left = complete(cache), len(partial(cache)), open_files(cache)

        assert files_in(await fetch_folder(nats_url, objects, cache)) == files_in(source)

    assert raised.value.code is ControlCode.STORAGE
    assert left == ([], int(is_kept), [])


async def test_a_cache_that_cannot_be_made_is_an_error(nats_url: str, tmp_path: Path) -> None:
    """The error names the folder that cannot be created."""
    (tmp_path / "file").touch()
    async with opened(nats_url) as nats, fresh_bucket(nats) as bucket:
        source = write_folder(tmp_path / "source", a=10)
        objects = await put_folder(nats, bucket, "p", source, max_bytes=BUCKET_BYTES)

        with pytest.raises(ControlError, match=rf"cannot be staged: File exists \({tmp_path}/file\)") as raised:
            await fetch_folder(nats_url, objects, tmp_path / "file" / "cache")

    assert raised.value.code is ControlCode.STORAGE


async def test_a_put_into_a_server_that_is_killed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put fails if its server is killed, and removes what it stored when the server is back."""
    require_binary()
    monkeypatch.setattr(writer, "ACK_TIMEOUT_S", 0.2)
    event = asyncio.Event()

    async def set_event(message: Msg) -> None:
        event.set()

    async with EmbeddedServer() as server, opened(server.url) as nats, asyncio.TaskGroup() as tasks:
        await ensure_bucket(nats, "bucket", max_bytes=BUCKET_BYTES)
        await subscribe(nats, "$O.bucket.C.>", set_event)

        async def put() -> None:
            with pytest.raises(BusBroken):
                await put_folder(nats, "bucket", "p", write_folder(tmp_path / "source", a=48 * MEGABYTE))

        task = tasks.create_task(put())
        await event.wait()
        await server.kill()
        await server.restart()
        await task

        assert await list_objects(nats, "bucket") == ()
        assert await stored_messages(nats, "bucket") == 0
