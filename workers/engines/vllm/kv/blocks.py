"""Blocks of a KV cache, in and out of files; in each of the engine's processes."""

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
        caches: by layer, with one entry along the first dimension for each block, or several where the kernels have
            smaller blocks.
        num_blocks: of the cache.
        shard: which of the engine's processes this is; the same in both engines.
    """

    def __init__(self, folder: KvFolder, caches: Mapping[str, Any], num_blocks: int, shard: str) -> None:
        self._folder = folder
        self._caches: dict[str, torch.Tensor] = dict(caches)
        self._num_blocks = num_blocks
        self._shard = shard
        for name, cache in caches.items():
            # Models with other states than keys and values have lists of tensors here, or from vLLM 0.32 on one plain
            # buffer for several layers (v1/kv_cache_interface.py: has_layer_views).
            if not isinstance(cache, torch.Tensor) or cache.dim() == 1 or len(cache) % num_blocks:
                raise TypeError(
                    f"the KV cache of {name} is not made of {num_blocks} blocks; another connector is needed"
                )

    def store(self, job: BlockTransfer) -> None:
        """Write blocks to a file, which is there once it is whole; a failure is logged, and noticed by the load."""
        try:
            with foreign_code():
                file = self._folder.file(job.kv_id, self._shard)
                file.parent.mkdir(exist_ok=True)
                unfinished = file.with_suffix(".tmp")
                save_file({name: self._read(cache, job.block_ids) for name, cache in self._caches.items()}, unfinished)
                unfinished.replace(file)
        except ForeignError:
            # The disk may be full. The engine must not die of it.
            logger.exception("kv.store_failed blocks=%d", len(job.block_ids))
            self._folder.drop(job.kv_id)

    def load(self, job: BlockTransfer) -> bool:
        """Read blocks from a file and delete it; False: it could not be."""
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
            # Anything may be wrong with a file from elsewhere. The engine must not die of it.
            logger.exception("kv.load_failed blocks=%d", len(job.block_ids))
            return False
        return True

    def _loaded(self, file: Path, job: BlockTransfer) -> dict[str, torch.Tensor]:
        """All of what belongs into the blocks, by layer, before any of them is touched."""
        with safe_open(file, "pt") as stored:
            if set(stored.keys()) != set(self._caches):
                raise ValueError("it is of a model with other layers")
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
                f"it has {tuple(stored.shape)} of {stored.dtype}; wanted are {len(job.block_ids)} blocks from "
                f"{job.first_block} on, of {tuple(cache.shape[1:])} of {cache.dtype}"
            )
        return entries
