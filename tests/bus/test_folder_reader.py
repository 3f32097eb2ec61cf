"""Objects of a stored folder are fetched once, verified, limited in size, and fetched at a limited rate."""

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.objects.reader import BURST_S, FolderReader, ObjectReader, TokenBucket
from rollbus.bus.objects.writer import put_folder
from rollbus.schemas.errors import ControlCode, ControlError
from tests.support.nats_server import opened
from tests.support.objects import BUCKET_BYTES, files_in, fresh_bucket, write_folder

MEGABYTE = 1024 * 1024


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


@given(
    st.integers(1, 10**9),
    st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 2)), min_size=1, max_size=50),
)
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
