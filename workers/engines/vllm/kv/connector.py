"""KV connector that transfers KV from prefill to decode workers through a shared folder.

It replaces vLLM's `ExampleConnector` (kv_transfer/kv_connector/v1/example_connector.py), which has these faults:

- It finds KV by the prompt tokens alone, so it also uses KV of older weights or other adapters.
- It stores a prompt that is computed in several steps before the prompt is complete.
- It stores every prompt and deletes none.
- A missing file kills the engine.

Here each prefill phase has its own id; see `KvPhaseTracker`. Loads are part of a step: no request waits for a load
between two steps, and an aborted request leaves no load behind.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from .....schemas.errors import ForeignError, foreign_code
from .config import STORAGE, TTL
from .files import BlockTransfer, KvFolder, KvPhaseTracker, Sweeper

if TYPE_CHECKING:
    import torch

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
                file.parent.mkdir(parents=True, exist_ok=True)
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
                    found = self._load_blocks(file, job)
                finally:
                    self._folder.drop_file(job.kv_id, self._shard)
                for name, cache in self._caches.items():
                    cache[self._index(cache, job.block_ids)] = found[name].to(cache.device)
        except ForeignError:
            # A file from another process may have any fault. This must not kill the engine.
            logger.exception("kv.load_failed blocks=%d", len(job.block_ids))
            return False
        return True

    def _load_blocks(self, file: Path, job: BlockTransfer) -> dict[str, torch.Tensor]:
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


@dataclass
class Jobs(KVConnectorMetadata):  # type: ignore[misc]
    """The stores and loads of one step. The scheduler sends them to each process of the engine."""

    stores: list[BlockTransfer] = field(default_factory=list)
    loads: list[BlockTransfer] = field(default_factory=list)


class SharedFolderConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The connector. vLLM creates one for its scheduler, and one in each process that has KV."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = KvFolder(Path(extra[STORAGE]), ttl_s=extra[TTL])
        self._folder.make()
        self._num_blocks: int = kv_cache_config.num_blocks
        self._tracker: KvPhaseTracker | None = None
        self._sweeper: Sweeper | None = None
        self._blocks: KvBlocks | None = None
        self._lost_block_ids: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            self._tracker = KvPhaseTracker(self._folder, vllm_config.cache_config.block_size)
            self._sweeper = Sweeper(self._folder)

    # In vLLM's scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of prompt tokens to load, and False: loads never run between steps."""
        return self._scheduling.num_to_load(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks in which a request is scheduled."""
        self._scheduling.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Jobs:
        """Return the stores and loads of this step."""
        return Jobs(*self._scheduling.next_jobs(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Record the end of a request. Return False (its blocks are free at once) and its KV transfer parameters."""
        from vllm.v1.request import RequestStatus

        is_length = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        return False, self._scheduling.finish(request, is_length=is_length)

    @property
    def _scheduling(self) -> KvPhaseTracker:
        if self._tracker is None:
            raise TypeError("this connector is not the scheduler's")
        return self._tracker

    # In each process that holds KV.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Store a reference to the KV cache."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        shard = f"pp{get_pp_group().rank_in_group}-tp{get_tp_group().rank_in_group}"
        self._blocks = KvBlocks(self._folder, kv_caches, self._num_blocks, shard)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the KV that this step needs, before the step is computed. Block until it is loaded."""
        if self._blocks is not None:
            for job in self._get_connector_metadata().loads:
                if not self._blocks.load(job):
                    self._lost_block_ids.update(job.block_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: `start_load_kv` has loaded all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: `wait_for_save` stores all layers together at the end of the step."""

    def wait_for_save(self) -> None:
        """Store the prompts that this step has completed, while their KV is still in its blocks."""
        if self._blocks is not None:
            for job in self._get_connector_metadata().stores:
                self._blocks.store(job)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load has failed, each once; `kv_load_failure_policy` decides about their requests."""
        lost, self._lost_block_ids = self._lost_block_ids, set()
        return lost

    def shutdown(self) -> None:
        """Stop deleting abandoned KV."""
        if self._sweeper is not None:
            self._sweeper.close()
