"""Decides for the first attempt of a request: a worker, or the queue. The caller passes in the time; nothing waits.

All work is counted in prompt tokens at the speed of the typical worker. The work at a worker is the sum of three costs:
the tokens that it computes before the prompt, the part of the prompt that it must compute, and its running requests.
The queue may give a request to any worker, so the median of the workers represents the queue. A worker gets a request
directly if its prefix cache makes it better than the median.
"""

import enum
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Generic, NamedTuple, TypeVar, get_args

import msgspec

from ....schemas.presence import WorkerPresence
from ....schemas.request import Lane
from ..fleet.presence import MAX_WORKERS
from .load import PIECE_TOKENS, CacheId, LoadTable, PrefixIndex, PrefixScope, WorkerLoad, hint_hash

MAX_AHEAD: Final = 1024
"""The maximum of leaders and followers of one lane that no worker has admitted: the default queue share of a client."""
K = TypeVar("K", bound=Hashable)
MASK: Final = (1 << 64) - 1
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
WAIT_TOKENS: Final = 1_024
"""Cached prompt tokens for which a turn of a session waits for a slot of its worker: four pieces. Fewer are computed
elsewhere in about the time of such a wait.
"""
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


class PlacementNeeds(NamedTuple):
    """The input for the placement of a request."""

    prompt_tokens: int
    pieces: tuple[int, ...]
    """The `piece_hashes` of the prompt, computed with the same `scope`."""
    scope: PrefixScope
    session_id: str | None = None
    """The session id. Clients that do not know the session use it to choose the same worker."""
    group_id: str | None = None
    """The id of the group of requests that share its prompt. They may be separate calls."""
    is_for_able_only: bool = False
    """True if a worker that serves the model cannot serve this request."""

    @property
    def session(self) -> int | None:
        """The `hint_hash` of its session."""
        return None if self.session_id is None else hint_hash("session", self.session_id, self.scope)

    @property
    def group(self) -> int | None:
        """The `hint_hash` of its group."""
        return None if self.group_id is None else hint_hash("group", self.group_id, self.scope)


NO_NEEDS: Final = PlacementNeeds(0, (), PrefixScope())
"""The needs of requests for which no worker is better than another. They are not computed for each of them."""


class Placement(NamedTuple):
    """The destination of a request."""

    worker: str | None
    """The worker; None: the queue."""
    reason: PlacementReason
    cached_tokens: int = 0
    """Prompt tokens that the worker should find in its prefix cache."""


QUEUED: Final = Placement(None, PlacementReason.QUEUED)


class PlacedRequest(msgspec.Struct):
    """A request that was sent to a worker or admitted by it."""

    worker: str
    wanted: PlacementNeeds
    placement: Placement | None
    """Placement of the request. None: the worker received it from the queue."""
    is_admitted: bool = False
    cache: CacheId | None = None
    """Cache that contains the prompt. None if unknown, for example before the admission."""


def may_wait(wanted: PlacementNeeds, placement: Placement) -> bool:
    """Return True if a placed request may wait for a slot of its worker: for its group, or for its session's cache."""
    return wanted.group is not None or (wanted.session_id is not None and placement.cached_tokens >= WAIT_TOKENS)


class PlacementPolicy:
    """Places the requests for one model.

    A client calls `place` or `place_group`, which change nothing. Then the client reports its action and the result.
    """

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self.loads = LoadTable()

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
            cached_tokens = self.index.longest(wanted.pieces, now).get(worker, 0) if wanted.pieces else 0
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
        if pieces:
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
        order = _sort_by_work(wanted, weights, able, now)
        half = len(order) // 2
        typical = weights.get(order[half].worker, 0)
        for load in order[:half]:
            worker = load.worker
            if weights.get(worker, 0) > typical and load.room(now):
                reason = reasons.get(worker, PlacementReason.PLACED_PREFIX)
                is_sibling = reason is PlacementReason.PLACED_GROUP
                return Placement(worker, reason, _count_shared_tokens(wanted) if is_sibling else cached.get(worker, 0))
        if is_group and typical < _count_shared_tokens(wanted):
            chosen = _pick_roomiest({load: load.room(now) for load in order}, GROUP_ROOM)
            # With one free slot, no other request of the group could follow.
            if chosen.room(now) > 1:
                return Placement(chosen.worker, PlacementReason.PLACED_GROUP, cached.get(chosen.worker, 0))
        if wanted.is_for_able_only:
            for load in order:
                if load.room(now):
                    return Placement(load.worker, PlacementReason.PLACED_ABLE, cached.get(load.worker, 0))
        return QUEUED

    def keep_place(self, wanted: PlacementNeeds, able: Sequence[WorkerLoad], now: float) -> Placement:
        """Decide whether a turn of a session that `place` sends to the queue waits at the full worker of its last turn.

        It keeps this place while the worker's cache holds enough of its prompt. A tool that runs until the cache has
        evicted it, or for `MAX_AGE_S` if the worker does not report evictions, loses the place. The worker that then
        takes the turn from the queue is its next place.
        """
        if wanted.session is None or wanted.group is not None:
            return QUEUED
        last = self.index.last_holder(wanted.session, now)
        for load in able:
            if load.worker == last and not load.room(now) and load.may_queue(now):
                kept = Placement(
                    last, PlacementReason.PLACED_SESSION, self.index.longest(wanted.pieces, now).get(last, 0)
                )
                return kept if may_wait(wanted, kept) else QUEUED
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
        order = _sort_by_work(wanted, weights, able, now)
        whole = _count_shared_tokens(wanted)
        if weights.get(order[len(order) // 2].worker, 0) >= whole:
            return self._place_apart(wanted, count, able, now)
        placements: list[Placement] = []
        for load, share in _share_group(wanted, count, cached, order, now).items():
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
        shares = _split_evenly({load: load.room(now) for load in chosen}, count)
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
                weight = 2 * _count_shared_tokens(wanted) + SIBLINGS_PER_PIECE * len(wanted.pieces) * RUNNING_TOKENS
                raise_weight(last, weight, PlacementReason.PLACED_GROUP)
        return weights, reasons


def _count_shared_tokens(wanted: PlacementNeeds) -> int:
    """Return the tokens of the prompt that a sibling finds cached."""
    return len(wanted.pieces) * PIECE_TOKENS


def _sort_by_work(
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


def _share_group(
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
    return _split_evenly(_pick_fewest(limited if sum(limited.values()) >= count else rooms, count), count)


def _pick_roomiest(rooms: Mapping[WorkerLoad, int], count: int) -> WorkerLoad:
    """Return the first worker with room for `count` requests, else the first worker with the most room."""
    for load, room in rooms.items():
        if room >= count:
            return load
    return max(rooms, key=rooms.__getitem__)


def _pick_fewest(rooms: Mapping[WorkerLoad, int], count: int) -> dict[WorkerLoad, int]:
    """Return the rooms of the fewest workers that together have room for `count` requests, or of all workers."""
    left = dict(rooms)
    chosen: dict[WorkerLoad, int] = {}
    while count > 0 and left:
        load = _pick_roomiest(left, count)
        chosen[load] = left.pop(load)
        count -= chosen[load]
    return chosen


def _split_evenly(rooms: Mapping[WorkerLoad, int], count: int) -> dict[WorkerLoad, int]:
    """Return how many requests each worker gets, as evenly as rooms allow. The sum is `count` if there is room."""
    left = min(count, sum(rooms.values()))
    result = dict(rooms)
    for i, load in enumerate(sorted(rooms, key=lambda load: rooms[load])):
        result[load] = min(rooms[load], left // (len(rooms) - i))
        left -= result[load]
    return result


class ModelPolicies:
    """One policy for each model, from the presence of the workers.

    Workers choose the name of their model. So names are kept only for the live workers, whose number the presence table
    limits.

    A model's policy ends with its last worker.
    """

    def __init__(self) -> None:
        self._policies: dict[str, PlacementPolicy] = {}
        # By worker.
        self._models: dict[str, str] = {}

    def __len__(self) -> int:
        """Return the number of models with a policy."""
        return len(self._policies)

    def of(self, model: str) -> PlacementPolicy:
        """Return the policy of a model. Without a worker it is an empty one: the queue gets all requests."""
        return self._policies.get(model) or PlacementPolicy()

    def update(self, presence: WorkerPresence, now: float) -> PlacementPolicy:
        """Handle the presence of a live worker, and return the policy of its model."""
        worker, model = presence.worker, presence.model
        if self._models.get(worker) != model:
            self.remove(worker)
            self._models[worker] = model
            self._policies.setdefault(model, PlacementPolicy())
        policy = self._policies[model]
        policy.update(presence, now)
        return policy

    def remove(self, worker: str) -> None:
        """Remove a lost worker, and the policy of its model if no other worker has that model."""
        model = self._models.pop(worker, None)
        if model is not None:
            self._policies[model].remove(worker)
            if not self._policies[model].loads:
                del self._policies[model]


@dataclass(slots=True)
class _Leader(Generic[K]):
    group: int
    lane: Lane
    followers: dict[K, Lane] = field(default_factory=dict)
    """In order of arrival, each with its own lane."""


class GroupLeaders(Generic[K]):
    """The leaders of one client and model that no worker has admitted yet, bounded by its requests in flight.

    The queue would spread the requests of a group over all workers, and each worker would compute their prompt. So only
    one request of the group, the *leader*, goes to the queue. Its followers go to the worker that admits it. If no
    worker admits it, they get another leader.

    A leader in the queue also represents its followers. So leader and followers count together against the client's
    share of a lane. Groups beyond the share wait in the client, in order. Otherwise a client's share would be about ten
    times as long.

    Args:
        max_ahead: leaders and followers of one lane at which no further request begins to lead.
    """

    def __init__(self, max_ahead: int = MAX_AHEAD) -> None:
        self._max_ahead = max_ahead
        self._leaders: dict[K, _Leader[K]] = {}
        self._leader_of: dict[K, K] = {}
        # By group: its last leader.
        self._last: dict[int, K] = {}
        # By lane: the number of leaders and followers.
        self._ahead: Counter[Lane] = Counter()
        self.queued: set[K] = set()
        """The leaders that the caller has sent to the queue. The caller adds them, `remove` removes them."""
        # By lane, in order of arrival: group and limit of the requests that wait until they may lead or follow.
        self._waiting: dict[Lane, dict[K, tuple[int, int]]] = {lane: {} for lane in get_args(Lane)}

    def __len__(self) -> int:
        """Return the number of requests that follow, or wait until they may lead or follow."""
        return len(self._leader_of) + sum(map(len, self._waiting.values()))

    def __contains__(self, key: K) -> bool:
        """Return True if the request follows, or waits until it may lead or follow."""
        return key in self._leader_of or any(key in waiting for waiting in self._waiting.values())

    @property
    def is_empty(self) -> bool:
        """True if no request leads, follows or waits."""
        return not self._leaders and not len(self)

    @property
    def has_due(self) -> bool:
        """True if `pop_due` would return requests or add followers."""
        return any(waiting and self._ahead[lane] < self._max_ahead for lane, waiting in self._waiting.items())

    def leads(self, key: K) -> bool:
        """Return True if the request is, or was, the leader of its group, and no worker has admitted it."""
        return key in self._leaders

    def add_leader(self, group: int, key: K, lane: Lane) -> None:
        """Make a request the leader of its group."""
        self._leaders[key] = _Leader(group, lane)
        self._last[group] = key
        self._ahead[lane] += 1

    def add(self, group: int, key: K, lane: Lane, limit: int) -> bool:
        """Let a request follow the last leader of its group, or lead, or wait until it may.

        Args:
            limit: followers of one leader.

        Returns:
            True if it leads: the caller publishes it.
        """
        if self._follow(group, key, lane, limit):
            return False
        if self._waiting[lane] or self._ahead[lane] >= self._max_ahead:
            self._waiting[lane][key] = group, limit
            return False
        self.add_leader(group, key, lane)
        return True

    def pop_due(self) -> list[K]:
        """Return the requests that waited and lead now, for the caller to publish.

        Others of their groups follow them.
        """
        due: list[K] = []
        for lane, waiting in self._waiting.items():
            while waiting and self._ahead[lane] < self._max_ahead:
                key = next(iter(waiting))
                group, limit = waiting.pop(key)
                if not self._follow(group, key, lane, limit):
                    self.add_leader(group, key, lane)
                    due.append(key)
        return due

    def remove(self, key: K) -> list[K]:
        """Remove a request, whether it leads, follows or waits. Return its followers, in order."""
        self.queued.discard(key)
        for waiting in self._waiting.values():
            waiting.pop(key, None)
        followed = self._leader_of.pop(key, None)
        if followed is not None:
            self._ahead[self._leaders[followed].followers.pop(key)] -= 1
        leader = self._leaders.pop(key, None)
        if leader is None:
            return []
        if self._last.get(leader.group) == key:
            del self._last[leader.group]
        self._ahead.subtract((leader.lane, *leader.followers.values()))
        for follower in leader.followers:
            del self._leader_of[follower]
        return list(leader.followers)

    def _follow(self, group: int, key: K, lane: Lane, limit: int) -> bool:
        leader = self._last.get(group)
        if leader is None or len(self._leaders[leader].followers) >= limit:
            return False
        self._leaders[leader].followers[key] = lane
        self._leader_of[key] = leader
        self._ahead[lane] += 1
        return True


def rendezvous(key: str, workers: Iterable[str]) -> str:
    """Return the worker with the highest weight for this key, for example a session. All callers get the same result.

    Raises:
        ValueError: there are no workers.
    """
    # A multiplication by an odd number reorders the hashes of workers. To hash each worker with the key takes ten times
    # as long.
    factor = _hash(key) | 1
    return max((_worker_hash(worker) * factor & MASK, worker) for worker in workers)[1]


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


_worker_hash = lru_cache(maxsize=MAX_WORKERS)(_hash)
