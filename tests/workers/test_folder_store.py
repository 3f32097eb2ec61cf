"""Folders that several processes share: built once, never deleted while used, and complete under their names."""

import asyncio
import errno
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.workers.sources import store as folder_store
from rollbus.workers.sources.store import FolderStore, Hold, PartialFolder, files_stamp
from tests.support.waits import SOON_S

SPAWN = multiprocessing.get_context("spawn")


def store(tmp_path: Path, *, model: str = "m", kept: int = 2, max_bytes: int | None = None) -> FolderStore:
    """Return the store of a process on the machine `tmp_path`."""
    return FolderStore(tmp_path / "shared.weights" / "checkpoints", model=model, max_bytes=max_bytes, kept=kept)


def complete(partial: PartialFolder, folder: Path) -> None:
    """Make a folder the complete one."""
    partial.complete(folder, files_stamp(folder))


async def build(folders: FolderStore, digest: str, size: int = 10) -> Hold:
    """Build a folder of one file."""
    partial = await folders.open(digest, ignore)
    assert isinstance(partial, PartialFolder)
    partial.make_room(size)
    folder = partial.reuse("folder")
    (folder / "file").write_bytes(bytes(size))
    complete(partial, folder)
    hold = folders.hold(digest)
    assert hold is not None
    folders.clean_up()
    return hold


def ignore() -> None:
    """Ignore a wait."""


def _hold(root: Path, digest: str, pipe: Connection) -> None:
    """Hold or build a folder in another process until it is killed."""
    folders = store(root)

    async def run() -> None:
        opened = await folders.open(digest, ignore)
        if isinstance(opened, PartialFolder):
            (opened.path / "fetched").write_bytes(b"half")
        pipe.send(type(opened).__name__)
        await asyncio.sleep(SOON_S)

    asyncio.run(run())


class Other:
    """Another process that holds or builds a folder."""

    def __init__(self, tmp_path: Path, digest: str) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_hold, args=(tmp_path, digest, theirs))
        self._process.start()
        assert self._pipe.poll(SOON_S)
        self.opened = self._pipe.recv()

    def kill(self) -> None:
        """Kill it. The operating system releases its locks."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(SOON_S)


async def test_a_folder_is_built_once(tmp_path: Path) -> None:
    """A folder exists when it is complete, is readable only for this user, and is found from then on."""
    folders = store(tmp_path)
    partial = await folders.open("a", ignore)
    assert isinstance(partial, PartialFolder)
    assert not folders.digests()
    folder = partial.reuse("folder")
    (folder / "file").write_bytes(b"content")
    complete(partial, folder)
    hold = folders.hold("a")

    assert folders.digests() == {"a"}
    assert (hold.folder / "file").read_bytes() == b"content"
    assert hold.folder.parent.stat().st_mode & 0o777 == 0o700
    assert hold.folder.parent.parent.stat().st_mode & 0o777 == 0o700
    found = await store(tmp_path).open("a", ignore)
    assert isinstance(found, Hold)
    assert found.is_of_this_boot
    assert found.is_unchanged()


async def test_a_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    """A second builder waits without blocking, and then finds the folder of the first."""
    waits = asyncio.Event()
    first = await store(tmp_path).open("a", ignore)
    assert isinstance(first, PartialFolder)
    async with asyncio.TaskGroup() as tasks:
        second = tasks.create_task(store(tmp_path).open("a", waits.set))
        await asyncio.wait_for(waits.wait(), SOON_S)
        assert not second.done()
        complete(first, first.reuse("folder"))
        assert isinstance(await asyncio.wait_for(second, SOON_S), Hold)


async def test_another_builder_continues_with_the_files_of_a_killed_builder(tmp_path: Path) -> None:
    """The lock of a killed builder is released, and another builder continues with its files.

    No complete folder of that name exists before.
    """
    other, waits = Other(tmp_path, "a"), asyncio.Event()
    assert other.opened == "PartialFolder"
    folders = store(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        mine = tasks.create_task(folders.open("a", waits.set))
        await asyncio.wait_for(waits.wait(), SOON_S)
        assert not folders.digests()
        other.kill()
        partial = await asyncio.wait_for(mine, SOON_S)

    assert isinstance(partial, PartialFolder)
    assert (partial.path / "fetched").read_bytes() == b"half"
    partial.leave(discard=True)
    assert not partial.path.exists()


async def test_a_folder_that_another_process_uses_stays(tmp_path: Path) -> None:
    """A folder that another process uses stays, also after many newer folders. It is removed after its last use."""
    folders = store(tmp_path)
    (await build(folders, "a")).release()
    other = Other(tmp_path, "a")
    assert other.opened == "Hold"
    for digest in "bcd":
        (await build(folders, digest)).release()
    assert folders.digests() == {"a", "c", "d"}
    other.kill()

    (await build(folders, "e")).release()

    assert folders.digests() == {"d", "e"}


async def test_without_locks_the_folders_of_this_process_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks, a store protects only the folders of its own process."""

    def refuse(fd: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not folder_store.can_lock(tmp_path)
    folders = store(tmp_path)
    held = await build(folders, "a")
    for digest in "bc":
        (await build(folders, digest)).release()

    (await build(folders, "d")).release()

    assert folders.digests() == {"a", "c", "d"}
    held.release()


async def test_a_new_folder_reuses_the_files_of_the_oldest_unused_folder(tmp_path: Path) -> None:
    """A new folder reuses the files of the oldest unused folder, which is then no complete folder any more."""
    folders = store(tmp_path)
    for digest in "ab":
        (await build(folders, digest)).release()
    inode = (folders.folder("a") / "file").stat().st_ino
    partial = await folders.open("c", ignore)
    assert isinstance(partial, PartialFolder)

    folder = partial.reuse("folder")

    assert folders.digests() == {"b"}
    assert (folder / "file").stat().st_ino == inode
    assert partial.reuse("folder") == folder
    partial.leave(discard=True)


async def test_an_old_folder_that_another_process_deletes_meanwhile_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process deletes the old folder just before its reuse, a new folder is made and no lock remains."""
    folders = store(tmp_path)
    for digest in "ab":
        (await build(folders, digest)).release()
    partial, listed = await folders.open("c", ignore), folders._own_by_last_use
    assert isinstance(partial, PartialFolder)
    monkeypatch.setattr(folders, "_own_by_last_use", lambda: (listed(), store(tmp_path).delete("a"))[0])
    assert [*partial.reuse("folder").iterdir()] == []
    assert not folders.lock_file("a").exists()
    partial.leave(discard=True)


async def test_a_folder_in_use_is_never_reused(tmp_path: Path) -> None:
    """If all old folders are in use, a new folder is made."""
    folders = store(tmp_path)
    held = await build(folders, "a")
    (await build(folders, "b")).release()
    partial = await folders.open("c", ignore)
    assert isinstance(partial, PartialFolder)

    assert [*partial.reuse("folder").iterdir()] == []
    assert folders.digests() == {"a", "b"}
    held.release()
    partial.leave(discard=True)


async def test_a_full_store_deletes_unused_folders_and_then_rejects_new_folders(tmp_path: Path) -> None:
    """A full store deletes unused folders, and else fails before the first byte with used, needed and allowed bytes."""
    folders = store(tmp_path, max_bytes=10_000)
    held = await build(folders, "a", 4000)
    (await build(folders, "b", 5000)).release()
    partial = await folders.open("c", ignore)
    assert isinstance(partial, PartialFolder)

    with pytest.raises(ControlError) as raised:
        partial.make_room(7000)
    assert raised.value.code is ControlCode.STORAGE
    assert "7000 bytes do not fit below" in raised.value.message
    assert re.search(r": 4\d\d\d bytes are in use there", raised.value.message)
    assert "the limit is 10000 (--stage-bytes)" in raised.value.message
    assert folders.digests() == {"a"}
    partial.make_room(5000)
    held.release()


async def test_fetched_bytes_of_a_partial_folder_are_not_counted_twice(tmp_path: Path) -> None:
    """Bytes that an earlier try has fetched are not counted twice."""
    partial = await store(tmp_path, max_bytes=1000).open("a", ignore)
    assert isinstance(partial, PartialFolder)
    (partial.path / "fetched").write_bytes(bytes(800))

    partial.make_room(900)
    with pytest.raises(ControlError, match="1100 bytes do not fit"):
        partial.make_room(1100)


async def test_a_folder_too_large_for_the_disk_is_rejected_before_its_first_byte(tmp_path: Path) -> None:
    """A folder that does not fit on the disk is rejected before its first byte."""
    partial = await store(tmp_path).open("a", ignore)
    assert isinstance(partial, PartialFolder)

    with pytest.raises(ControlError, match=r"do not fit on the disk of .*: it has \d+ free"):
        partial.make_room(2**60)


async def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock file itself cannot be written, the next try of the same process need not wait."""
    folders = store(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="No space left"):
            await folders.open("a", ignore)
    opened = await folders.open("a", lambda: pytest.fail("it waits for a lock"))
    assert isinstance(opened, PartialFolder)
    opened.leave(discard=True)


async def test_a_folder_that_was_deleted_in_use_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If somebody deletes a folder in use, nobody waits for its users: the next process builds it again."""
    monkeypatch.setattr(folder_store, "STALLED_S", 2.0)
    folders = store(tmp_path)
    hold = await build(folders, "a")
    shutil.rmtree(hold.folder)
    (await build(folders, "a")).release()
    hold.release()


@pytest.mark.parametrize("is_held", [True, False])
async def test_unused_partial_folders_are_removed_after_a_day(tmp_path: Path, is_held: bool) -> None:
    """An unused partial folder is removed after a day. Younger ones stay for the next try."""
    folders = store(tmp_path)
    for digest in ("old", "young"):
        partial = await folders.open(digest, ignore)
        assert isinstance(partial, PartialFolder)
        if digest == "young" or not is_held:
            partial.leave(discard=False)
    day_ago = time.time() - folder_store.LEFT_S - 1
    os.utime(folders.root / ".old.lock", (day_ago, day_ago))

    folders.clean_up()

    assert folders.partial("young").exists()
    assert folders.partial("old").exists() is is_held


async def test_a_folder_of_an_earlier_boot_is_unconfirmed_until_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of an earlier boot is unconfirmed until its content is checked: a crash may have damaged it."""
    folders = store(tmp_path)
    (await build(folders, "a")).release()
    monkeypatch.setattr(folder_store, "boot_id", lambda: "another boot")
    hold = folders.hold("a")
    before = hold.is_of_this_boot

    hold.confirm(files_stamp(hold.folder))

    assert (before, hold.is_of_this_boot) == (False, True)
    hold.release()
    hold.release()
    assert folders.held["a"] == 0


@pytest.mark.parametrize("is_held_elsewhere", [True, False])
async def test_a_damaged_folder_is_retired_once(tmp_path: Path, is_held_elsewhere: bool) -> None:
    """A damaged folder is retired, also while another process holds it. A later retirement keeps the new folder."""
    folders = store(tmp_path)
    hold, late = await build(folders, "a"), store(tmp_path).hold("a")
    other = Other(tmp_path, "a") if is_held_elsewhere else None
    (hold.folder / "file").write_bytes(b"changed")
    assert not hold.is_unchanged()

    hold.retire()

    assert folders.digests() == set()
    (await build(folders, "a")).release()
    late.retire()
    found = folders.hold("a")
    assert found.is_unchanged()
    found.release()
    assert folders.held["a"] == 0
    assert [path.name for path in folders.root.iterdir() if path.name.endswith(".partial")] == []
    if other is not None:
        other.kill()


async def test_a_folder_detects_lost_new_and_changed_files(tmp_path: Path) -> None:
    """A folder detects lost, new and changed files, also of the same size, by the time of change."""
    folders = store(tmp_path)
    hold = await build(folders, "a")
    content = (hold.folder / "file").read_bytes()
    states = [hold.is_unchanged()]
    (hold.folder / "file").write_bytes(bytes(reversed(content)))
    states.append(hold.is_unchanged())
    hold.confirm(files_stamp(hold.folder))
    (hold.folder / "more").touch()
    states.append(hold.is_unchanged())
    hold.confirm(files_stamp(hold.folder))
    (hold.folder / "file").unlink()
    states.append(hold.is_unchanged())

    assert states == [True, False, False, False]
    hold.release()


async def test_folders_are_counted_separately_for_each_model(tmp_path: Path) -> None:
    """Folders of another model stay until they are unused for a day."""
    mine, theirs = store(tmp_path), store(tmp_path, model="other")
    for folders, digests in ((theirs, "ab"), (mine, "cde")):
        for digest in digests:
            (await build(folders, digest)).release()
    assert mine.digests() == {"a", "b", "d", "e"}
    day_ago = time.time() - folder_store.LEFT_S - 1
    os.utime(mine.root / ".b.lock", (day_ago, day_ago))

    (await build(mine, "f")).release()

    assert mine.digests() == {"a", "e", "f"}


async def test_the_wait_for_a_stalled_builder_fails_with_its_process_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for a stalled builder fails with its process id. The next try waits again."""
    first = await store(tmp_path).open("a", ignore)
    assert isinstance(first, PartialFolder)
    monkeypatch.setattr(folder_store, "STALLED_S", 0.2)

    with pytest.raises(ControlError, match=rf"\.a\.lock is locked by the process {os.getpid()}, which") as raised:
        await store(tmp_path).open("a", ignore)

    assert raised.value.code is ControlCode.STORAGE
    first.leave(discard=True)


def test_the_wait_for_a_builder_that_makes_progress_has_no_limit(tmp_path: Path) -> None:
    """A builder that makes progress is waited for without limit."""
    now = 0.0
    path = tmp_path / ".a.lock"
    path.write_bytes(b"builder 7")
    watch = folder_store.LockWatch(path, lambda: now)
    for step in range(5):
        now = step * folder_store.STALLED_S * 0.9
        os.utime(path, (step, step))
        watch.check()
    now += folder_store.STALLED_S
    with pytest.raises(ControlError, match="the process 7, which has made no progress for 60 s"):
        watch.check()


async def test_a_partial_folder_beside_a_complete_folder_is_removed(tmp_path: Path) -> None:
    """A partial folder beside a complete one is removed, also if that is in use, but not if its lock is held."""
    folders = store(tmp_path)
    held = await build(folders, "a")
    folders.partial("a").mkdir()
    folders.clean_up()
    assert not folders.partial("a").exists()
    held.release()
    folders.partial("a").mkdir()
    lock = folder_store.try_lock(folders.root / ".a.lock", is_exclusive=True)
    assert lock is not None
    folders.clean_up()
    assert folders.partial("a").exists()
    os.close(lock)
