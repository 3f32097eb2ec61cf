"""Rejects output that a worker cannot have: ids outside its vocabulary, and versions that were never recorded.

A version above the announced one may be news, because presence and frames use different subscriptions. Then the client
reads the desired state once, which has each version before a worker serves it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace

from ...schemas.chunk import Chunk
from ...schemas.control import LoadLora, lora_register
from ...schemas.desired import DesiredState
from ...schemas.errors import RollbusError
from ...schemas.limits import MAX_WEIGHT_VERSION
from ...schemas.messages import Frame, RequestKey
from ...schemas.presence import WorkerPresence
from ..control.store import DesiredStore
from ..protocol.fleet.desired import effective, target_version
from ..protocol.fleet.presence_table import PresenceTable
from ..protocol.stream.announced import Announced, announced_by, are_within, problem_of
from .children import ChildRequest
from .losses import Losses

__all__ = ["ResultCheck"]

logger = logging.getLogger(__name__)

READ_S: Final = 1.0
"""Seconds for a read of the desired state. Frames wait meanwhile. It takes a round trip."""
UNREADABLE_S: Final = 10.0
"""Seconds without another read after one that failed. Versions are not checked meanwhile, and workers get no new ones:
a version is recorded before a worker loads it."""
NOT_CHECKED: Final = (MAX_WEIGHT_VERSION, MAX_WEIGHT_VERSION)


class ResultCheck:
    """Checks frames against the presence of their workers.

    Args:
        find: returns the open request of a chunk, or None.
    """

    def __init__(
        self,
        table: PresenceTable,
        store: DesiredStore,
        losses: Losses,
        find: Callable[[str, int, int], ChildRequest | None],
    ) -> None:
        self._table = table
        self._store = store
        self._losses = losses
        self._find = find
        self._unreadable_until = 0.0
        self.num_rejected = 0
        """Number of chunks that were rejected."""

    def __repr__(self) -> str:
        """Return one line with the count."""
        return f"<ResultCheck rejected={self.num_rejected}>"

    def is_plausible(self, worker: str, frame: Frame) -> bool:
        """Return True if all chunks are within what the worker announced. It is called for each frame."""
        presence = self._table.get(worker)
        return presence is not None and presence.incarnation == frame.incarnation and are_within(frame.chunks, presence)

    async def without_false(self, worker: str, frame: Frame) -> Frame:
        """Return the frame without false chunks, and fail their requests as `protocol_error`."""
        states: dict[str, DesiredState | None] = {}
        false: list[Chunk] = []
        for chunk in frame.chunks:
            child = self._find(chunk.request_id, chunk.attempt, chunk.child)
            # Chunks of other requests are dropped later.
            if child is not None and (child.worker, child.incarnation) in ((None, None), (worker, frame.incarnation)):
                problem = await self._problem(worker, frame.incarnation, child, chunk, states)
                if problem is not None:
                    false.append(chunk)
                    self._reject(worker, frame.incarnation, chunk, problem)
        return replace(frame, chunks=[chunk for chunk in frame.chunks if chunk not in false]) if false else frame

    def _reject(self, worker: str, incarnation: str, chunk: Chunk, problem: str) -> None:
        self.num_rejected += 1
        if self.num_rejected.bit_count() == 1:  # log number 1, 2, 4, 8 ..., so that a flood of chunks floods no log
            logger.warning("chunk.rejected worker=%s so_far=%s error=%s", worker, self.num_rejected, problem)
        # The request may have ended while the desired state was read.
        key = RequestKey(chunk.request_id, chunk.attempt, chunk.child)
        self._losses.fail_false((worker, incarnation), key, f"worker {worker} sent {problem}")

    async def _problem(
        self, worker: str, incarnation: str, child: ChildRequest, chunk: Chunk, states: dict[str, DesiredState | None]
    ) -> str | None:
        model, lora = child.open_call.model, child.stream.asked.lora
        if problem_of(chunk, self._announced(worker, incarnation, model, lora)) is None:
            return None
        recorded = NOT_CHECKED
        if model in states or await self._read(model, states):
            recorded = _recorded(states[model], worker, lora)
        # Presence may have arrived meanwhile.
        now = self._announced(worker, incarnation, model, lora)
        return problem_of(chunk, Announced(now.vocab_size, *map(max, now[1:], recorded)))

    def _announced(self, worker: str, incarnation: str, model: str, lora: str | None) -> Announced:
        """Return what the worker announced. If that is not known: what any worker of the model announced."""
        own = self._table.get(worker)
        others = self._table.workers(model)
        if own is None or own.incarnation != incarnation:
            return announced_by(_with_lora(others, lora))
        found = announced_by(_with_lora((own,), lora))
        return found if own.capabilities is not None else found._replace(vocab_size=announced_by(others).vocab_size)

    async def _read(self, model: str, states: dict[str, DesiredState | None]) -> bool:
        """Read the desired state. Return False if it cannot be read."""
        if time.monotonic() < self._unreadable_until:
            return False
        try:
            async with asyncio.timeout(READ_S):
                states[model] = await self._store.read(model)
        except (RollbusError, TimeoutError) as error:
            self._unreadable_until = time.monotonic() + UNREADABLE_S
            logger.warning("version.check_failed model=%s error=%r", model, error)
            return False
        return True


def _with_lora(workers: Iterable[WorkerPresence], lora: str | None) -> list[WorkerPresence]:
    """Return the presence of workers, with this adapter only."""
    return [replace(each, loras=tuple(info for info in each.loras if info.name == lora)) for each in workers]


def _recorded(state: DesiredState | None, worker: str, lora: str | None) -> tuple[int, int]:
    """Return the recorded versions of the weights and of this adapter; 0: none."""
    if state is None:
        return 0, 0
    recorded = effective(state, worker).get(lora_register(lora or ""))
    adapter = None if recorded is None else recorded.command
    return target_version(state, worker) or 0, adapter.version if isinstance(adapter, LoadLora) else 0
