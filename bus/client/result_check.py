"""Rejects output that a worker cannot have: ids outside its vocabulary, and versions that were never recorded.

A version above the announced one may be news, because presence and frames use different subscriptions. Then the client
reads the desired state once, which has each version before a worker serves it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from ...schemas.chunk import Chunk
from ...schemas.control import LoadLora, lora_register
from ...schemas.desired import DesiredState
from ...schemas.errors import BusBroken, RollbusError
from ...schemas.limits import MAX_WEIGHT_VERSION
from ...schemas.messages import Frame, RequestKey
from ..control.store import DesiredStore
from ..protocol.fleet.desired import effective, target_version
from ..protocol.fleet.presence_table import PresenceTable
from ..protocol.queue.suspects import Engine
from ..protocol.stream.announced import Announced, announced_by, are_within, problem_of
from .children import ChildRequest
from .losses import Losses

__all__ = ["ResultCheck"]

logger = logging.getLogger(__name__)

READ_S: Final = 1.0
"""Seconds for a read of the desired state. Frames wait meanwhile. It takes a round trip."""
CONFIRMED_S: Final = 1.5
"""Seconds since a majority of the servers of a cluster confirmed the server that answers the read: more than the second
between two heartbeats of a leader. Versions are not checked by an older answer."""
UNREADABLE_S: Final = 10.0
"""Seconds without another read after one that failed. Versions are not checked meanwhile, and workers get no new ones:
a version is recorded before a worker loads it."""
ENDED_S: Final = 60.0
"""Seconds after the record of an adapter's end in which frames of it may arrive, also if clocks differ. Its version is
in no state then."""
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
        # The desired state that was read last.
        self._last_model: str | None = None
        self._last_state: DesiredState | None = None
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
        engine = worker, frame.incarnation
        announced: dict[tuple[str, str], Announced] = {}
        has_read: set[str] = set()
        false: list[Chunk] = []
        for chunk in frame.chunks:
            child = self._find(chunk.request_id, chunk.attempt, chunk.child)
            # Chunks of other requests are dropped later.
            if child is None or (child.worker, child.incarnation) not in ((None, None), engine):
                continue
            use = _use_of(child)
            if use not in announced:
                announced[use] = self._announced(engine, *use)
            if problem_of(chunk, announced[use]) is None:
                continue
            problem = await self._problem(engine, child, chunk, has_read)
            announced.clear()  # presence may have arrived meanwhile
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

    async def _problem(self, engine: Engine, child: ChildRequest, chunk: Chunk, has_read: set[str]) -> str | None:
        model, lora = _use_of(child)

        def problem(recorded: tuple[int, int]) -> str | None:
            now = self._announced(engine, model, lora)
            # Tokens may arrive after the presence of a rollback or of an unloaded adapter.
            return problem_of(chunk, Announced(now.vocab_size, *map(max, now[1:], recorded, child.stream.versions)))

        if model == self._last_model and problem(_recorded(self._last_state, engine[0], lora)) is None:
            # A read for each frame would hold up the frames of all workers.
            return None
        if model in has_read or await self._read(model):
            has_read.add(model)
            return problem(_recorded(self._last_state, engine[0], lora))
        return problem(NOT_CHECKED)

    def _announced(self, engine: Engine, model: str, lora: str) -> Announced:
        """Return what the worker announced. If that is not known: what any worker of the model announced."""
        own = self._table.get(engine[0])
        if own is None or own.incarnation != engine[1]:
            return announced_by(self._table.workers(model), lora)
        found = announced_by((own,), lora)
        if own.capabilities is not None:
            return found
        return found._replace(vocab_size=announced_by(self._table.workers(model), lora).vocab_size)

    async def _read(self, model: str) -> bool:
        """Read the desired state. Return False if it cannot be read."""
        if time.monotonic() < self._unreadable_until:
            return False
        try:
            async with asyncio.timeout(READ_S):
                # A server that is cut off from its cluster would answer with an old state.
                confirmed_s = await self._store.confirmed_s()
                if confirmed_s > CONFIRMED_S:
                    raise BusBroken(f"the leader of the desired states was last confirmed {confirmed_s:.1f} s ago")
                self._last_state = await self._store.read(model)
        except (RollbusError, TimeoutError) as error:
            self._unreadable_until = time.monotonic() + UNREADABLE_S
            logger.warning("version.check_failed model=%s error=%r", model, error)
            return False
        self._last_model = model
        return True


def _use_of(child: ChildRequest) -> tuple[str, str]:
    """Return the model of a request and its adapter. Without an adapter, one with the model's name may answer."""
    model = child.open_call.model
    return model, child.stream.asked.lora or model


def _recorded(state: DesiredState | None, worker: str, lora: str) -> tuple[int, int]:
    """Return the recorded versions of the weights and of this adapter; 0: none."""
    if state is None:
        return 0, 0
    recorded = effective(state, worker).get(lora_register(lora))
    version = 0
    if recorded is not None and isinstance(recorded.command, LoadLora):
        version = recorded.command.version
    elif recorded is not None and abs(time.time() - recorded.at) < ENDED_S:
        version = MAX_WEIGHT_VERSION
    return target_version(state, worker) or 0, version
