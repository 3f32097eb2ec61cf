"""Decides for the first attempt of a request: a worker, or the queue. The caller passes in the time; nothing waits.

All work is counted in prompt tokens at the speed of the typical worker. The work at a worker is the sum of three costs:
the tokens that it computes before the prompt, the part of the prompt that it must compute, and its running requests.
The queue may give a request to any worker, so the median of the workers represents the queue. A worker gets a request
directly if its prefix cache makes it better than the median.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ....schemas.presence import WorkerPresence
from ..queue.rendezvous import rendezvous
from .prefix_index import PIECE_TOKENS, CacheId, PrefixIndex, PrefixScope, hint_hash
from .worker_load import LoadTable, WorkerLoad

__all__ = ["SIBLINGS_PER_PIECE", "Placement", "PlacementNeeds", "PlacementPolicy", "PlacementReason"]

RUNNING_TOKENS: Final = 256
"""The cost of a running request for another one at the same worker: the time of one or two prompt tokens in each of
about a hundred common engine steps.
"""
STEP_TOKENS: Final = 6_400
"""The cost of the engine steps of a request that runs alone: each step takes about as long as 100 prompt tokens."""
BACKLOG_SHARE: Final = 0.5
"""The weight of tokens that a worker computes before the prompt: they only delay, the prompt's own tokens are work too.
"""
GROUP_ROOM: Final = 8
"""Free slots of the worker that gets the first request of a group of unknown size."""
SIBLINGS_PER_PIECE: Final = 8
"""Siblings that one worker gets for each piece of their prompt, if others have room. More siblings would slow each
other down for longer than the prompt takes. Groups of the usual 8 stay together, also with the shortest known prompt.
"""


class PlacementReason(enum.StrEnum):
    """The reason for a placement. Append-only."""

    PLACED_PREFIX = "placed_prefix"
    """The worker has the beginning of the prompt in its prefix cache."""
    PLACED_GROUP = "placed_group"
    """The worker computes the prompt once for several requests of a group."""
    PLACED_SESSION = "placed_session"
    """The worker served the session last. For a session unknown to them, all clients choose the same worker."""
    PLACED_ABLE = "placed_able"
    """The queue could give the request to a worker that cannot serve it."""
    QUEUED = "queued"
    """No worker with room is better than the queue."""


@dataclass(frozen=True, slots=True)
class PlacementNeeds:
    """The input for the placement of a request."""

    prompt_tokens: int
    pieces: tuple[int, ...]
    """The `piece_hashes` of the prompt."""
    session: int | None = None
    """The `hint_hash` of its session."""
    session_id: str | None = None
    """The session id. Clients that do not know the session use it to choose the same worker."""
    group: int | None = None
    """The `hint_hash` of the group of requests that share its prompt. They may be separate calls."""
    is_for_able_only: bool = False
    """True if a worker that serves the model cannot serve this request."""

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        pieces: tuple[int, ...],
        scope: PrefixScope,
        *,
        session_id: str | None = None,
        group_id: str | None = None,
        is_for_able_only: bool = False,
    ) -> "PlacementNeeds":
        """Return the input for the placement of a request, from the names of its session and its group.

        Args:
            pieces: `piece_hashes` of the prompt, computed with the same `scope`.
        """
        return cls(
            prompt_tokens=prompt_tokens,
            pieces=pieces,
            session=None if session_id is None else hint_hash("session", session_id, scope),
            session_id=session_id,
            group=None if group_id is None else hint_hash("group", group_id, scope),
            is_for_able_only=is_for_able_only,
        )


class Placement(NamedTuple):
    """The destination of a request."""

    worker: str | None
    """The worker; None: the queue."""
    reason: PlacementReason
    cached_tokens: int = 0
    """Prompt tokens that the worker should find in its prefix cache."""


QUEUED: Final = Placement(None, PlacementReason.QUEUED)


class PlacementPolicy:
    """Places the requests for one model.

    A client calls `place` or `place_group`, which change nothing. Then the client reports its action and the result.
    """

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self.loads = LoadTable()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<PlacementPolicy {self.index} {self.loads}>"

    # Reports of a client.

    def update(self, presence: WorkerPresence, now: float) -> None:
        """Handle the presence of a worker of the model."""
        cache = CacheId(presence.worker, presence.incarnation, presence.cache_epoch)
        self.index.update(cache, presence.oldest_prefix_s, now)
        self.loads.update(presence, now)

    def remove(self, worker: str) -> None:
        """Remove a lost worker."""
        self.index.remove(worker)
        self.loads.remove(worker)

    def placed(self, wanted: PlacementNeeds, placement: Placement, now: float) -> None:
        """Count a request that was sent to the worker of its placement. The others of its group follow it."""
        worker = placement.worker
        if worker is None:
            return
        self.loads.placed(worker, max(wanted.prompt_tokens - placement.cached_tokens, 0), now)
        cache = self.index.cache_of(worker)
        if wanted.group is not None and cache is not None:
            self.index.record(cache, (wanted.group,), now)

    def admitted(self, wanted: PlacementNeeds, worker: str, now: float, *, was_placed: bool) -> CacheId | None:
        """Record that a worker has admitted a request.

        Args:
            was_placed: True if `placed` has counted it; False: the worker got it from the queue.

        Returns:
            The cache that has its prompt, for `ended`; None: the worker is not known.
        """
        if was_placed:
            self.loads.admitted(worker)
        else:
            cached_tokens = self.index.longest(wanted.pieces, now).get(worker, 0)
            self.loads.placed(worker, wanted.prompt_tokens - cached_tokens, now)
        cache = self.index.cache_of(worker)
        if cache is not None:
            self.index.record(cache, wanted.pieces, now)
            for hint in (wanted.session, wanted.group):
                if hint is not None:
                    self.index.record(cache, (hint,), now)
        return cache

    def ended(self, cache: CacheId, pieces: Sequence[int], now: float) -> None:
        """Record that a request has ended at a worker, whose cache has all its tokens.

        For a request that failed or was lost, `loads.ended` counts the free slot.

        Args:
            cache: the value that `admitted` returned.
            pieces: `piece_hashes` of prompt and generated tokens together.
        """
        self.index.record(cache, pieces, now)
        self.loads.ended(cache.worker)

    def refused(self, wanted: PlacementNeeds, worker: str, now: float) -> None:
        """Count a placed request that its worker rejected for lack of room."""
        self.loads.refused(worker, now)
        self._scatter(wanted, worker)

    def silent(self, wanted: PlacementNeeds, worker: str, now: float) -> None:
        """Count a placed request that its worker did not answer in time."""
        self.loads.silent(worker, now)
        self._scatter(wanted, worker)

    def _scatter(self, wanted: PlacementNeeds, worker: str) -> None:
        """Stop the others of a group from following a request that its worker did not admit."""
        if wanted.group is not None:
            self.index.discard(worker, wanted.group)

    # Decisions.

    def place(self, wanted: PlacementNeeds, able: Sequence[WorkerLoad], now: float) -> Placement:
        """Decide where a request goes.

        Args:
            able: the workers that serve the model and can serve this request.
        """
        cached = self.index.longest(wanted.pieces, now)
        is_group = wanted.group is not None and bool(wanted.pieces)
        if not able or not (cached or is_group or wanted.session_id or wanted.is_for_able_only):
            return QUEUED
        weights, reasons = self._weigh(wanted, cached, able, now)
        order = _by_work(wanted, weights, able, now)
        half = len(order) // 2
        typical = weights.get(order[half].worker, 0)
        for load in order[:half]:
            worker = load.worker
            if weights.get(worker, 0) > typical and load.room(now):
                reason = reasons.get(worker, PlacementReason.PLACED_PREFIX)
                is_sibling = reason is PlacementReason.PLACED_GROUP
                return Placement(worker, reason, _whole(wanted) if is_sibling else cached.get(worker, 0))
        if is_group and typical < _whole(wanted):
            chosen = _roomiest({load: load.room(now) for load in order}, GROUP_ROOM)
            # With one free slot, no other request of the group could follow.
            if chosen.room(now) > 1:
                return Placement(chosen.worker, PlacementReason.PLACED_GROUP, cached.get(chosen.worker, 0))
        if wanted.is_for_able_only:
            for load in order:
                if load.room(now):
                    return Placement(load.worker, PlacementReason.PLACED_ABLE, cached.get(load.worker, 0))
        return QUEUED

    def place_group(
        self, wanted: PlacementNeeds, count: int, able: Sequence[WorkerLoad], now: float
    ) -> list[Placement]:
        """Decide where `count` samples of one request go. Samples of one worker are adjacent, queued samples come last.

        Args:
            able: the workers that serve the model and can serve this request.
        """
        if count == 1 or not able or not wanted.pieces:
            return self._place_apart(wanted, count, able, now)
        cached = self.index.longest(wanted.pieces, now)
        weights, reasons = self._weigh(wanted, cached, able, now)
        order = _by_work(wanted, weights, able, now)
        whole = _whole(wanted)
        if weights.get(order[len(order) // 2].worker, 0) >= whole:
            return self._place_apart(wanted, count, able, now)
        placements: list[Placement] = []
        for load, share in _group_shares(wanted, count, cached, order, now).items():
            held = cached.get(load.worker, 0)
            usual = PlacementReason.PLACED_PREFIX if held else PlacementReason.PLACED_GROUP
            reason = reasons.get(load.worker, usual)
            placements += [Placement(load.worker, reason, whole if i else held) for i in range(share)]
        return placements + [QUEUED] * (count - len(placements))

    def _place_apart(
        self, wanted: PlacementNeeds, count: int, able: Sequence[WorkerLoad], now: float
    ) -> list[Placement]:
        """Decide where samples go that share no work: each as if it were alone, while there is room."""
        one = self.place(wanted, able, now)
        chosen = [load for load in able if one.worker == load.worker or (one.worker and wanted.is_for_able_only)]
        shares = _shares({load: load.room(now) for load in chosen}, count)
        placements = [one._replace(worker=load.worker) for load, share in shares.items() for _ in range(share)]
        return placements + [QUEUED] * (count - len(placements))

    def _weigh(
        self, wanted: PlacementNeeds, cached: Mapping[str, int], able: Sequence[WorkerLoad], now: float
    ) -> tuple[dict[str, int], dict[str, PlacementReason]]:
        """Return the cached tokens to count at each worker, and the reason if these are more than the index has."""
        weights = dict(cached)
        reasons: dict[str, PlacementReason] = {}

        def raise_weight(worker: str, weight: int, reason: PlacementReason) -> None:
            if weight > weights.get(worker, 0):
                weights[worker], reasons[worker] = weight, reason

        if wanted.session is not None and wanted.session_id is not None:
            last = self.index.last_holder(wanted.session, now)
            workers = [load.worker for load in able]
            worker = last if last in workers else rendezvous(wanted.session_id, workers)
            # Short turns save little. One piece is enough to keep their worker while the load is even.
            raise_weight(worker, max(wanted.prompt_tokens - PIECE_TOKENS, PIECE_TOKENS), PlacementReason.PLACED_SESSION)
        if wanted.group is not None:
            last = self.index.last_holder(wanted.group, now)
            if last is not None:
                # The worker must compute the first one's prompt before, and runs siblings. This weight offsets both.
                weight = 2 * _whole(wanted) + SIBLINGS_PER_PIECE * len(wanted.pieces) * RUNNING_TOKENS
                raise_weight(last, weight, PlacementReason.PLACED_GROUP)
        return weights, reasons


def _whole(wanted: PlacementNeeds) -> int:
    """Return the tokens of the prompt that a sibling finds cached."""
    return len(wanted.pieces) * PIECE_TOKENS


def _by_work(
    wanted: PlacementNeeds, weights: Mapping[str, int], able: Sequence[WorkerLoad], now: float
) -> list[WorkerLoad]:
    """Return the workers in the order of their work until the request would end there, the least first."""
    tokens = wanted.prompt_tokens + STEP_TOKENS
    weight_of = weights.get
    # Usually a worker is not slow and has computed all its prompts.
    works = [
        tokens - weight_of(load.worker, 0) + RUNNING_TOKENS * load.running
        if load.computing_until <= now and load.slowness == 1
        else load.slowness
        * (tokens - weight_of(load.worker, 0) + RUNNING_TOKENS * load.running + BACKLOG_SHARE * load.backlog(now))
        for load in able
    ]
    # Among equal workers, each prompt starts with another one, so that clients do not all choose the same worker.
    start = wanted.pieces[-1] % len(able) if wanted.pieces else 0
    return [able[i] for i in sorted(range(start - len(able), start), key=works.__getitem__)]


def _group_shares(
    wanted: PlacementNeeds, count: int, cached: Mapping[str, int], order: Sequence[WorkerLoad], now: float
) -> dict[WorkerLoad, int]:
    """Return how many samples of one prompt each worker gets; their sum is at most `count`."""
    limit = SIBLINGS_PER_PIECE * len(wanted.pieces)
    if limit >= count:
        # Usually the first worker has room for all.
        for load in order:
            if load.room(now) >= count:
                return {load: count}
    # If a worker must compute the prompt, a single sample there saves nothing.
    rooms = {load: room for load in order if (room := load.room(now)) > (load.worker not in cached)}
    limited = {load: min(room, limit) for load, room in rooms.items()}
    return _shares(_fewest(limited if sum(limited.values()) >= count else rooms, count), count)


def _roomiest(rooms: Mapping[WorkerLoad, int], count: int) -> WorkerLoad:
    """Return the first worker with room for `count` requests, else the first worker with the most room."""
    for load, room in rooms.items():
        if room >= count:
            return load
    return max(rooms, key=rooms.__getitem__)


def _fewest(rooms: Mapping[WorkerLoad, int], count: int) -> dict[WorkerLoad, int]:
    """Return the rooms of the fewest workers that together have room for `count` requests, or of all workers."""
    left = dict(rooms)
    chosen: dict[WorkerLoad, int] = {}
    while count > 0 and left:
        load = _roomiest(left, count)
        chosen[load] = left.pop(load)
        count -= chosen[load]
    return chosen


def _shares(rooms: Mapping[WorkerLoad, int], count: int) -> dict[WorkerLoad, int]:
    """Return how many requests each worker gets, as evenly as rooms allow. The sum is `count` if there is room."""
    left = min(count, sum(rooms.values()))
    result = dict(rooms)
    for i, load in enumerate(sorted(rooms, key=lambda load: rooms[load])):
        result[load] = min(rooms[load], left // (len(rooms) - i))
        left -= result[load]
    return result
