"""Writes blocks of a KV cache to files and reads them, in each process of the engine."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .....schemas.foreign_code import ForeignError, foreign_code
from .folder import KvFolder
from .phase_tracker import BlockTransfer

__all__ = ["KvBlocks"]

logger = logging.getLogger(__name__)


class KvBlocks:
    """The KV cache of one process.

    Args:
        caches: cache of each layer by name. Its first dimension has one entry per block, or several entries if the
            kernels use smaller blocks.
        num_blocks: number of blocks of the cache.
        shard: name of this process in its engine; the same in both engines.
    """

    def __init__(self, folder: KvFolder, caches: Mapping[str, Any], num_blocks: int, shard: str) -> None:
        self._folder = folder
        self._caches: dict[str, torch.Tensor] = dict(caches)
        self._num_blocks = num_blocks
        self._shard = shard
        for name, cache in caches.items():
            # Models with states other than keys and values have lists of tensors here. From vLLM 0.32 on, they may have
            # one plain buffer for several layers (v1/kv_cache_interface.py: has_layer_views).
            if not isinstance(cache, torch.Tensor) or cache.dim() == 1 or len(cache) % num_blocks:
                raise TypeError(
                    f"the KV cache of {name} does not consist of {num_blocks} blocks; use another connector"
                )

    def store(self, job: BlockTransfer) -> None:
        """Write blocks to a file, which gets its name when it is complete. Log a failure; the later load then fails."""
        try:
            with foreign_code():
                file = self._folder.file(job.kv_id, self._shard)
                file.parent.mkdir(exist_ok=True)
                unfinished = file.with_suffix(".tmp")
                save_file({name: self._read(cache, job.block_ids) for name, cache in self._caches.items()}, unfinished)
                unfinished.replace(file)
        except ForeignError:
            # For example, the disk is full. This must not kill the engine.
            logger.exception("kv.store_failed blocks=%d", len(job.block_ids))
            self._folder.drop(job.kv_id)

    def load(self, job: BlockTransfer) -> bool:
        """Read blocks from a file and delete the file. Return False if the blocks cannot be read."""
        try:
            with foreign_code():
                file = self._folder.file(job.kv_id, self._shard)
                try:
                    found = self._loaded(file, job)
                finally:
                    self._folder.drop_file(job.kv_id, self._shard)
                for name, cache in self._caches.items():
                    cache[self._index(cache, job.block_ids)] = found[name].to(cache.device)
        except ForeignError:
            # A file from another process may have any fault. This must not kill the engine.
            logger.exception("kv.load_failed blocks=%d", len(job.block_ids))
            return False
        return True

    def _loaded(self, file: Path, job: BlockTransfer) -> dict[str, torch.Tensor]:
        """Return the content of all blocks by layer. An error in the file thus leaves the whole cache unchanged."""
        with safe_open(file, "pt") as stored:
            if set(stored.keys()) != set(self._caches):
                raise ValueError("the KV file belongs to a model with other layers")
            return {name: self._entries(stored.get_tensor(name), cache, job) for name, cache in self._caches.items()}

    def _read(self, cache: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        return cache[self._index(cache, block_ids)].contiguous().cpu()

    def _index(self, cache: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        per_block = len(cache) // self._num_blocks
        first = torch.tensor(block_ids, device=cache.device)[:, None] * per_block
        return (first + torch.arange(per_block, device=cache.device)).flatten()

    def _entries(self, stored: torch.Tensor, cache: torch.Tensor, job: BlockTransfer) -> torch.Tensor:
        per_block = len(cache) // self._num_blocks
        first = job.first_block * per_block
        entries = stored[first : first + len(job.block_ids) * per_block]
        if entries.dtype != cache.dtype or entries.shape != (len(job.block_ids) * per_block, *cache.shape[1:]):
            raise ValueError(
                f"the KV file has shape {tuple(stored.shape)} and dtype {stored.dtype}; expected "
                f"{len(job.block_ids)} blocks from block {job.first_block} on, "
                f"with shape {tuple(cache.shape[1:])} and dtype {cache.dtype}"
            )
        return entries
