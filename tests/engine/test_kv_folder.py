import os
import time
from pathlib import Path

import pytest
import torch

from rollbus.workers.engines.vllm.kv.connector import KvBlocks
from rollbus.workers.engines.vllm.kv.files import BlockTransfer, KvFolder, Sweeper, new_kv_id

NUM_BLOCKS = 8
SHARD = "pp0-tp0"


@pytest.fixture
def folder(tmp_path: Path) -> KvFolder:
    """Return a KV folder whose files are abandoned after a minute."""
    return KvFolder(tmp_path, ttl_s=60)


def caches(seed: int, *, per_block: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the KV caches of two layers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS * per_block, 2, 32 // per_block, 16)
    return {name: torch.rand(shape, generator=generator).to(dtype) for name in ("layers.0", "layers.1")}


def set_age(tmp_path: Path, kv_id: str, age_s: float) -> None:
    """Set the age of a transfer's folder."""
    then = time.time() - age_s
    os.utime(tmp_path / kv_id, (then, then))


@pytest.mark.parametrize("per_block", [1, 4])
def test_loaded_blocks_equal_the_stored_blocks(folder: KvFolder, tmp_path: Path, per_block: int) -> None:
    """The loaded blocks equal the stored ones, in other blocks and from the middle on. The load removes the file."""
    source, target = caches(0, per_block=per_block), caches(1, per_block=per_block)
    untouched = {name: cache.clone() for name, cache in target.items()}
    kv_id = new_kv_id()
    KvBlocks(folder, source, NUM_BLOCKS, SHARD).store(BlockTransfer(kv_id=kv_id, block_ids=[5, 0, 3]))
    assert [file.name for file in (tmp_path / kv_id).iterdir()] == [f"{SHARD}.safetensors"]

    assert KvBlocks(folder, target, NUM_BLOCKS, SHARD).load(BlockTransfer(kv_id=kv_id, block_ids=[2, 7], first_block=1))
    for name, cache in target.items():
        blocks = cache.view(NUM_BLOCKS, -1)
        stored = source[name].view(NUM_BLOCKS, -1)
        expected = untouched[name].view(NUM_BLOCKS, -1)
        expected[2], expected[7] = stored[0], stored[3]
        assert torch.equal(blocks, expected)
    assert list(tmp_path.iterdir()) == []


def test_each_process_of_an_engine_has_its_own_file(folder: KvFolder, tmp_path: Path) -> None:
    """Each process has its own file. The last process removes the transfer's folder."""
    kv_id = new_kv_id()
    shards = [(f"pp0-tp{rank}", caches(rank), caches(9)) for rank in range(2)]
    for shard, source, _ in shards:
        KvBlocks(folder, source, NUM_BLOCKS, shard).store(BlockTransfer(kv_id=kv_id, block_ids=[1]))
    for shard, source, target in shards:
        assert (tmp_path / kv_id).is_dir()
        assert KvBlocks(folder, target, NUM_BLOCKS, shard).load(BlockTransfer(kv_id=kv_id, block_ids=[4]))
        assert all(torch.equal(target[name][4], source[name][1]) for name in source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "other layers", "other dtype", "too few blocks", "bad id"])
def test_an_invalid_file_changes_no_block_and_is_removed(folder: KvFolder, tmp_path: Path, damage: str) -> None:
    """A file that is missing, truncated or of another model is not loaded and changes no block. It is then removed."""
    kv_id = new_kv_id()
    source = caches(0, dtype=torch.bfloat16 if damage == "other dtype" else torch.float32)
    if damage == "other layers":
        del source["layers.1"]
    KvBlocks(folder, source, NUM_BLOCKS, SHARD).store(BlockTransfer(kv_id=kv_id, block_ids=[1, 2]))
    file = folder.file(kv_id, SHARD)
    if damage == "missing":
        file.unlink()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:3000])
    target = caches(1)
    wanted = [4, 5, 6] if damage == "too few blocks" else [4, 5]
    job = BlockTransfer(kv_id="../other" if damage == "bad id" else kv_id, block_ids=wanted)

    assert not KvBlocks(folder, target, NUM_BLOCKS, SHARD).load(job)
    assert all(torch.equal(target[name], cache) for name, cache in caches(1).items())
    assert list(tmp_path.glob("*/*.safetensors")) == ([file] if damage == "bad id" else [])


def test_a_failed_store_leaves_no_file(folder: KvFolder, tmp_path: Path) -> None:
    """A failed store leaves no file that a load could accept as KV, and raises no error."""
    kv_id = new_kv_id()
    # A folder blocks the name of the file that is written first.
    (tmp_path / kv_id / f"{SHARD}.tmp").mkdir(parents=True)
    KvBlocks(folder, caches(0), NUM_BLOCKS, SHARD).store(BlockTransfer(kv_id=kv_id, block_ids=[1]))

    assert list(tmp_path.iterdir()) == []


def test_a_cache_without_blocks_is_refused(folder: KvFolder) -> None:
    """If a layer's cache does not consist of blocks, the engine does not start, so nothing is stored wrongly."""
    with pytest.raises(TypeError, match=r"layers\.0 does not consist of 8 blocks"):
        KvBlocks(folder, {"layers.0": [torch.zeros(8), torch.zeros(8)]}, NUM_BLOCKS, SHARD)


def test_the_sweep_deletes_only_old_transfers(folder: KvFolder, tmp_path: Path) -> None:
    """The sweep deletes old transfers. It leaves young transfers and other files."""
    old, young = new_kv_id(), new_kv_id()
    for name in (old, young, "something-else"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    set_age(tmp_path, old, 61)
    set_age(tmp_path, "something-else", 10_000)

    assert folder.sweep() == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {young, "something-else"}


def test_the_sweeper_deletes_old_files_in_an_unused_folder(tmp_path: Path) -> None:
    """The sweeper deletes old files without any other use of the folder."""
    kv_id = new_kv_id()
    (tmp_path / kv_id).mkdir()
    set_age(tmp_path, kv_id, 1000)
    sweeper = Sweeper(KvFolder(tmp_path, ttl_s=0.5))
    try:
        while (tmp_path / kv_id).exists():
            time.sleep(0.01)
    finally:
        sweeper.close()
