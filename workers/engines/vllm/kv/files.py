"""Files with KV, in a folder that prefill and decode workers share, and the phases whose KV is in them.

A prefill phase is a request whose `kv_transfer_params` have `do_remote_decode`. Each one has its own subfolder. Its KV
is stored in the step that computes the last part of its prompt, so the file is complete before the id of the KV is
published. A decode phase has `do_remote_prefill` and the parameters that `finish` returned for the prefill phase. Its
KV is loaded once, when it is first scheduled.
"""

import logging
import re
import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


KV_ID = re.compile(r"[0-9a-f]{32}")
"""Name of a subfolder. Files and folders with other names are never read, written or deleted."""
SWEEP_INTERVAL_S = 10.0
"""Maximum seconds between two searches for abandoned KV; a search lists the folder once."""
SWEEPS_PER_LIFE = 10
"""Minimum number of searches within `ttl_s` seconds."""
GIVES = "do_remote_decode"
TAKES = "do_remote_prefill"


def new_kv_id() -> str:
    """Return a new id that no other prefill phase has."""
    return uuid.uuid4().hex


class KvFolder:
    """The shared folder. A program with access to the folder can read and change all KV in it.

    Share the folder only among the workers of one fleet.

    Args:
        root: absolute path; `make` creates it.
        ttl_s: age in seconds after which KV counts as abandoned.
    """

    def __init__(self, root: Path, *, ttl_s: float) -> None:
        self._root = root
        self.ttl_s = ttl_s

    def make(self) -> None:
        """Create the folder if it does not exist."""
        self._root.mkdir(parents=True, exist_ok=True)

    def file(self, kv_id: str, shard: str) -> Path:
        """Return the path of the KV of one process of the engine.

        Raises:
            ValueError: `kv_id`, which another worker may have sent, is not an id of KV.
        """
        return self._path(kv_id) / f"{shard}.safetensors"

    def drop_file(self, kv_id: str, shard: str) -> None:
        """Delete the file of one process, and after the last file the folder of the phase; ignore missing files."""
        self.file(kv_id, shard).unlink(missing_ok=True)
        try:
            self._path(kv_id).rmdir()
        except OSError:
            # Other processes of the engine have not read their files yet.
            return

    def drop(self, kv_id: str) -> None:
        """Delete the KV of a prefill phase that no worker will request; ignore missing KV."""
        shutil.rmtree(self._path(kv_id), ignore_errors=True)

    def sweep(self) -> int:
        """Delete abandoned KV, and return the number of its prefill phases."""
        oldest = time.time() - self.ttl_s
        num_swept = 0
        for path in self._root.iterdir():
            try:
                is_abandoned = KV_ID.fullmatch(path.name) is not None and path.stat().st_mtime < oldest
            except FileNotFoundError:
                # Another worker has read or deleted it meanwhile.
                continue
            if is_abandoned:
                shutil.rmtree(path, ignore_errors=True)
                num_swept += 1
        return num_swept

    def _path(self, kv_id: str) -> Path:
        if KV_ID.fullmatch(kv_id) is None:
            raise ValueError("invalid KV id; expected 32 hexadecimal digits")
        return self._root / kv_id


class Sweeper:
    """A thread that deletes abandoned KV, even while the engine is idle. It ends with `close` or with the process."""

    def __init__(self, folder: KvFolder) -> None:
        self._folder = folder
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="kv-sweeper", daemon=True).start()

    def close(self) -> None:
        """Stop the thread after a running search."""
        self._closed.set()

    def _run(self) -> None:
        interval_s = min(SWEEP_INTERVAL_S, self._folder.ttl_s / SWEEPS_PER_LIFE)
        while not self._closed.wait(interval_s):
            try:
                num_swept = self._folder.sweep()
            except OSError:
                logger.exception("kv.sweep_failed folder=%r", self._folder)
                continue
            if num_swept:
                logger.warning("kv.swept legs=%d older_than_s=%g", num_swept, self._folder.ttl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTransfer:
    """Blocks to store or to load in the current step."""

    kv_id: str
    block_ids: list[int]
    first_block: int = 0
    """Index of the prompt's block that `block_ids[0]` contains."""


@dataclass(slots=True)
class _Giving:
    """A prefill phase in the engine."""

    num_prompt_tokens: int
    block_ids: list[int]
    kv_id: str = field(default_factory=new_kv_id)
    is_stored: bool = False


class KvPhaseTracker:
    """The prefill phases in one engine, at most one per request, and the loads of decode phases.

    Args:
        block_size: tokens in a block of the KV cache; only whole blocks are transferred.
    """

    def __init__(self, folder: KvFolder, block_size: int) -> None:
        self._folder = folder
        self._block_size = block_size
        self._giving: dict[str, _Giving] = {}
        self._loads: list[BlockTransfer] = []

    def num_to_load(self, request: Any, num_computed_tokens: int) -> int:
        """Return the number of prompt tokens to load after the `num_computed_tokens` in this engine; whole blocks."""
        return max(self._num_handed(request) - num_computed_tokens, 0)

    def admit(self, request: Any, block_ids: Sequence[int], num_to_load: int) -> None:
        """Record that the scheduler runs `request` in these blocks, for the first time or again."""
        params = request.kv_transfer_params or {}
        if params.get(GIVES):
            known = self._giving.get(request.request_id)
            giving = known or _Giving(request.num_prompt_tokens, [])
            giving.block_ids = list(block_ids)
            self._giving[request.request_id] = giving
        if params.get(TAKES):
            num_handed = self._num_handed(request)
            # The load deletes the KV. After a later preemption, this engine computes the prompt itself.
            params[TAKES] = False
            if num_to_load:
                past = num_handed // self._block_size
                first = past - num_to_load // self._block_size
                kv_id = params["kv_id"]
                self._loads.append(BlockTransfer(kv_id=kv_id, block_ids=list(block_ids[first:past]), first_block=first))
            else:
                self._drop(params)

    def next_jobs(self, output: Any) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Return the stores and the loads of the step `output` of vLLM's scheduler."""
        stores: list[BlockTransfer] = []
        for new in output.scheduled_new_reqs:
            self._advance(new.req_id, new.num_computed_tokens, output.num_scheduled_tokens, stores)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            giving = self._giving.get(request_id)
            new_block_ids = cached.new_block_ids[index]
            # `admit` was called again for a resumed request, with all of its blocks.
            if giving is not None and new_block_ids is not None and request_id not in cached.resumed_req_ids:
                giving.block_ids += new_block_ids[0]
            self._advance(request_id, cached.num_computed_tokens[index], output.num_scheduled_tokens, stores)
        loads, self._loads = self._loads, []
        return stores, loads

    def finish(self, request: Any, *, is_length: bool) -> dict[str, Any] | None:
        """Record the end of a request. For a prefill phase, return the parameters of its decode phase, or None.

        Args:
            is_length: True if the request reached its maximum number of tokens, so a decode phase may follow.
        """
        giving = self._giving.pop(request.request_id, None)
        if giving is not None and giving.is_stored:
            if is_length:
                num_tokens = giving.num_prompt_tokens // self._block_size * self._block_size
                return {TAKES: True, GIVES: False, "kv_id": giving.kv_id, "num_tokens": num_tokens}
            self._folder.drop(giving.kv_id)
        params = request.kv_transfer_params or {}
        if params.get(TAKES):
            # The request ended before it was scheduled, so its KV was not loaded.
            self._drop(params)
        return None

    def _advance(
        self, request_id: str, num_computed: int, num_scheduled: Mapping[str, int], stores: list[BlockTransfer]
    ) -> None:
        giving = self._giving.get(request_id)
        if giving is None:
            return
        num_tokens = num_computed + num_scheduled[request_id]
        num_blocks = giving.num_prompt_tokens // self._block_size
        if num_blocks and num_computed < giving.num_prompt_tokens <= num_tokens:
            giving.is_stored = True
            stores.append(BlockTransfer(kv_id=giving.kv_id, block_ids=giving.block_ids[:num_blocks]))

    def _num_handed(self, request: Any) -> int:
        """Return the number of prompt tokens whose KV can be loaded; the engine must compute at least one token."""
        params = request.kv_transfer_params or {}
        num_tokens = params.get("num_tokens")
        if not params.get(TAKES) or not isinstance(params.get("kv_id"), str) or not isinstance(num_tokens, int):
            return 0
        num_loadable: int = max(min(num_tokens, request.num_prompt_tokens - 1), 0)
        return num_loadable // self._block_size * self._block_size

    def _drop(self, params: Mapping[str, Any]) -> None:
        try:
            self._folder.drop(str(params.get("kv_id")))
        except ValueError:
            # The id is invalid, so no worker has stored KV for it.
            return
