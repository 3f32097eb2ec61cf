"""Decides for the first attempt of a request: this worker, or the queue. Time is passed in; nothing here waits.

All work is counted in prompt tokens at the speed of the typical worker: what a worker has to compute before the prompt,
what of the prompt it has to compute, and what its running requests cost. The queue gives a request to any worker with
room, for which the median stands. A worker gets the request directly if it is better than that because of its prefix
cache.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ....schemas.presence import WorkerPresence
from ..queue.rendezvous import rendezvous
from .prefix_index import PIECE_TOKENS, CacheId, PrefixIndex
from .worker_load import LoadTable, WorkerLoad

__all__ = ["Placement", "PlacementPolicy", "PlacementReason", "PlacementWanted"]

RUNNING_TOKENS: Final = 64
"""What a running request costs another one at the same worker: a token in each engine step that both are in."""
STEP_TOKENS: Final = 6_400
"""What the engine steps of one request cost by themselves: a step takes as long as about a hundred prompt tokens."""
GROUP_ROOM: Final = 8
"""Room that is looked for where the first request of a group of unknown size goes."""


class PlacementReason(enum.StrEnum):
    """Why a request goes where it goes."""

    PLACED_PREFIX = "placed_prefix"
    """The worker holds a beginning of the prompt."""
    PLACED_GROUP = "placed_group"
    """The worker computes the prompt for the whole group."""
    PLACED_SESSION = "placed_session"
    """The worker served the session last, or is the one that all clients choose for a session that they do not know."""
    PLACED_ABLE = "placed_able"
    """A worker that cannot serve the request could get it from the queue."""
    QUEUED = "queued"
    """No worker is better than the queue."""


@dataclass(frozen=True, slots=True)
class PlacementWanted:
    """What a placement depends on."""

    prompt_tokens: int
    pieces: tuple[int, ...]
    """`piece_hashes` of the prompt."""
    session: int | None = None
    """`hint_hash` of its session."""
    session_id: str | None = None
    """The session itself: clients that do not know it agree on a worker by it."""
    group: int | None = None
    """`hint_hash` of its group, of which each request is placed by itself."""
    is_for_able_only: bool = False
    """Some worker that serves the model cannot serve this request, so the queue is the second best way."""


class Placement(NamedTuple):
    """Where a request goes."""

    worker: str | None
    """None: the queue."""
    reason: PlacementReason
    cached_tokens: int = 0
    """Prompt tokens that the worker should find in its cache."""


QUEUED: Final = Placement(None, PlacementReason.QUEUED)


class PlacementPolicy:
    """Places the requests for one model."""

    def __init__(self, index: PrefixIndex | None = None, loads: LoadTable | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self.loads = LoadTable() if loads is None else loads

    # What the client sees.

    def update(self, presence: WorkerPresence, now: float) -> None:
        """Handle the announcement of a worker of the model."""
        cache = CacheId(presence.worker, presence.incarnation, presence.cache_epoch)
        self.index.update(cache, presence.oldest_prefix_s, now)
        self.loads.update(presence, now)

    def remove(self, worker: str) -> None:
        """A worker is gone, or serves the model no more."""
        self.index.remove(worker)
        self.loads.remove(worker)

    def placed(self, wanted: PlacementWanted, placement: Placement, now: float) -> None:
        """Count a request that was sent to the worker of its placement; its siblings follow it."""
        if placement.worker is None:
            return
        self.loads.placed(placement.worker, wanted.prompt_tokens - placement.cached_tokens, now)
        cache = self.index.cache_of(placement.worker)
        if wanted.group is not None and cache is not None:
            self.index.record(cache, (wanted.group,), now)

    def admitted(self, wanted: PlacementWanted, worker: str, now: float, *, was_placed: bool) -> CacheId | None:
        """Record that a worker has admitted a request.

        Args:
            was_placed: it was sent there, and counted by `placed`; else the worker got it from the queue.

        Returns:
            The cache that holds its prompt now, for `ended`.
        """
        if not was_placed:
            cached = self.index.longest(wanted.pieces, now).get(worker, 0)
            self.loads.placed(worker, wanted.prompt_tokens - cached, now)
        cache = self.index.cache_of(worker)
        if cache is not None:
            self.index.record(cache, wanted.pieces, now)
            for hint in (wanted.session, wanted.group):
                if hint is not None:
                    self.index.record(cache, (hint,), now)
        return cache

    def ended(self, cache: CacheId, pieces: Sequence[int], now: float) -> None:
        """Record that a request ended at a worker, whose cache holds all its tokens.

        Args:
            cache: what `admitted` returned.
            pieces: `piece_hashes` of prompt and generated tokens together.
        """
        self.index.record(cache, pieces, now)
        self.loads.ended(cache.worker)

    def refused(self, wanted: PlacementWanted, worker: str, now: float) -> None:
        """A worker has refused a request that was placed there."""
        self.loads.refused(worker, now)
        if wanted.group is not None:
            self.index.discard(worker, wanted.group)

    def silent(self, wanted: PlacementWanted, worker: str, now: float) -> None:
        """A worker has not answered to a request that was placed there."""
        self.loads.silent(worker, now)
        if wanted.group is not None:
            self.index.discard(worker, wanted.group)

    # Decisions. They change nothing.

    def place(self, wanted: PlacementWanted, able: Sequence[WorkerLoad], now: float) -> Placement:
        """Decide where a request goes.

        Args:
            able: the workers that serve the model and can serve this request.
        """
        cached = self.index.longest(wanted.pieces, now)
        is_group = wanted.group is not None and bool(wanted.pieces)
        if not (cached or wanted.session_id or is_group or wanted.is_for_able_only):
            return QUEUED
        free = [load for load in able if load.room(now) > 0]
        if not free:
            return QUEUED
        hinted = dict(cached)
        session_worker = self._session_worker(wanted, free)
        if session_worker is not None:
            weight = max(wanted.prompt_tokens - PIECE_TOKENS, PIECE_TOKENS)
            hinted[session_worker] = max(hinted.get(session_worker, 0), weight)
        group_worker = None if wanted.group is None else self.index.last_holder(wanted.group)
        if group_worker is not None and is_group:
            hinted[group_worker] = len(wanted.pieces) * PIECE_TOKENS
        order = self._order(wanted, hinted, free, now)
        typical = hinted.get(order[len(order) // 2].worker, 0)
        for load in order[: len(order) // 2]:
            worker = load.worker
            if hinted.get(worker, 0) > typical:
                reason = PlacementReason.PLACED_PREFIX
                if worker == group_worker:
                    reason = PlacementReason.PLACED_GROUP
                elif worker == session_worker:
                    reason = PlacementReason.PLACED_SESSION
                return Placement(worker, reason, cached.get(worker, 0))
        if is_group and not typical:
            return Placement(_roomiest(order, GROUP_ROOM, now).worker, PlacementReason.PLACED_GROUP)
        if wanted.is_for_able_only:
            return Placement(order[0].worker, PlacementReason.PLACED_ABLE, cached.get(order[0].worker, 0))
        return QUEUED

    def place_group(
        self, wanted: PlacementWanted, count: int, able: Sequence[WorkerLoad], now: float
    ) -> list[Placement]:
        """Decide where `count` samples of one request go: those of one worker side by side, the queued ones last."""
        cached = self.index.longest(wanted.pieces, now)
        free = [load for load in able if load.room(now) > 0]
        if not free or not wanted.pieces:
            return [self.place(wanted, able, now)] * count
        order = self._order(wanted, cached, free, now)
        chosen = _roomiest(order, count, now)
        num_placed = min(chosen.room(now), count)
        first = cached.get(chosen.worker, 0)
        reason = PlacementReason.PLACED_PREFIX if first else PlacementReason.PLACED_GROUP
        whole = len(wanted.pieces) * PIECE_TOKENS
        return [
            Placement(chosen.worker, reason, whole if i else first) if i < num_placed else QUEUED for i in range(count)
        ]

    def _session_worker(self, wanted: PlacementWanted, free: Sequence[WorkerLoad]) -> str | None:
        if wanted.session is None or wanted.session_id is None:
            return None
        known = self.index.last_holder(wanted.session)
        return known or rendezvous(wanted.session_id, (load.worker for load in free))

    def _order(
        self, wanted: PlacementWanted, cached: dict[str, int], free: Sequence[WorkerLoad], now: float
    ) -> list[WorkerLoad]:
        """Return the workers by how much there is to do until the request has ended there, the least first."""
        tokens = wanted.prompt_tokens + STEP_TOKENS

        def work(load: WorkerLoad) -> float:
            ahead = load.backlog(now) + RUNNING_TOKENS * load.running
            return load.slowness * (ahead + tokens - cached.get(load.worker, 0))

        return sorted(free, key=work)


def _roomiest(order: Sequence[WorkerLoad], count: int, now: float) -> WorkerLoad:
    """Return the first worker with room for `count` requests, else the one with the most room."""
    for load in order:
        if load.room(now) >= count:
            return load
    return max(order, key=lambda load: load.room(now))
