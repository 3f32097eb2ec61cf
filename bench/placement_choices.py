"""The ways to choose a worker that `bench.placement` simulates: each is a `Way` of `bench.placement_sim`."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from bench.placement_engine import Job
from bench.placement_traces import Conversation
from rollbus.bus.protocol.placement.policy import Placement, PlacementPolicy, PlacementReason, PlacementWanted
from rollbus.bus.protocol.placement.prefix_index import PIECE_TOKENS, CacheId, PrefixScope, piece_hashes
from rollbus.bus.protocol.placement.worker_load import WorkerLoad
from rollbus.bus.protocol.queue.rendezvous import rendezvous
from rollbus.schemas.presence import WorkerPresence

__all__ = ["LeastLoaded", "Ours", "QueueOnly", "SessionsOnly", "Static", "session_of"]


def session_of(conversation: Conversation) -> str:
    """Return what its requests have in common with others: their group, or the conversation itself."""
    return conversation.group or conversation.name


class QueueOnly:
    """Nothing is placed."""

    waits_at_worker = False
    follows = False

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Note what a worker said of itself."""

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the worker, or None, of each of `count` samples of `job`'s request."""
        return [None] * count

    def follow(self, job: Job, worker: str, now: float, *, is_queueing: bool) -> str:
        """Return where `job` follows the first of its group, which `worker` has; `is_queueing` if others wait."""
        return worker

    def admitted(self, job: Job, worker: str, now: float) -> None:
        """Note that a worker has begun with a request."""

    def ended(self, job: Job, worker: str, now: float) -> None:
        """Note that it has ended."""

    def refused(self, job: Job, worker: str, now: float) -> None:
        """Note that a worker was too full for a placed request."""


class SessionsOnly(QueueOnly):
    """What rollbus had before: a session goes to its last worker while that announces room, else to the queue.

    Groups are sessions.
    """

    def __init__(self) -> None:
        self._free: dict[str, int] = {}
        self._last: dict[str, str] = {}

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Note its room."""
        self._free[presence.worker] = presence.free_slots

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the session's worker."""
        session = session_of(job.conversation)
        worker = self._last.get(session) or rendezvous(session, self._free)
        return [worker if self._free[worker] else None] * count

    def admitted(self, job: Job, worker: str, now: float) -> None:
        """Remember the worker that served the session last."""
        self._last[session_of(job.conversation)] = worker


class LeastLoaded(QueueOnly):
    """Each request goes at once to the worker that has the fewest, and waits there."""

    waits_at_worker = True

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Know that it is there."""
        self._open.setdefault(presence.worker, 0)

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the least loaded, one after another."""
        workers = []
        for _ in range(count):
            worker = min(self._open, key=self._open.__getitem__)
            self._open[worker] += 1
            workers.append(worker)
        return workers

    def ended(self, job: Job, worker: str, now: float) -> None:
        """Count it no more."""
        self._open[worker] -= 1


class Static(QueueOnly):
    """The hash of the group or the conversation chooses the worker, and it waits there."""

    waits_at_worker = True

    def __init__(self) -> None:
        self._workers: dict[str, None] = {}
        self._chosen: defaultdict[str, str] = defaultdict(str)

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Know that it is there."""
        self._workers.setdefault(presence.worker)

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the hash's worker."""
        session = session_of(job.conversation)
        worker = self._chosen[session] = self._chosen[session] or rendezvous(session, self._workers)
        return [worker] * count


class Ours(QueueOnly):
    """The policy of `rollbus.bus.protocol.placement`, told what a client would tell it."""

    follows = True

    def __init__(self) -> None:
        self._policy = PlacementPolicy()
        self._caches: dict[Job, CacheId | None] = {}
        self._able: dict[str, WorkerLoad] = {}
        self._unanswered: Counter[str] = Counter()

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Give it to the policy."""
        self._policy.update(presence, now)
        # What a worker has not answered yet had not come when it announced its room.
        for _ in range(self._unanswered[presence.worker]):
            self._policy.loads.placed(presence.worker, 0, now)
        load = self._policy.loads.get(presence.worker)
        if load is not None:
            self._able[presence.worker] = load

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return what the policy says."""
        wanted, able = _wanted(job), list(self._able.values())
        if count == 1:
            placements = [self._policy.place(wanted, able, now)]
        else:
            placements = self._policy.place_group(wanted, count, able, now)
        for placement in placements:
            self._note(wanted, placement, now)
        return [placement.worker for placement in placements]

    def _note(self, wanted: PlacementWanted, placement: Placement, now: float) -> None:
        self._policy.placed(wanted, placement, now)
        if placement.worker is not None:
            self._unanswered[placement.worker] += 1

    def follow(self, job: Job, worker: str, now: float, *, is_queueing: bool) -> str:
        """Return another worker that has room if nothing else waits, else the worker that has the prompt."""
        wanted = _wanted(job)
        placement = Placement(worker, PlacementReason.PLACED_GROUP, len(wanted.pieces) * PIECE_TOKENS)
        if not is_queueing:
            free = self._policy.place(wanted, list(self._able.values()), now)
            placement = placement if free.worker is None else free
        self._note(wanted, placement, now)
        return placement.worker or worker

    def admitted(self, job: Job, worker: str, now: float) -> None:
        """Tell the policy, which remembers the prompt."""
        self._unanswered[worker] -= job.is_placed
        self._caches[job] = self._policy.admitted(_wanted(job), worker, now, was_placed=job.is_placed)

    def ended(self, job: Job, worker: str, now: float) -> None:
        """Tell the policy, which remembers all tokens."""
        cache = self._caches.pop(job)
        if cache is not None:
            self._policy.ended(cache, piece_hashes(job.sequence, PrefixScope()), now)

    def refused(self, job: Job, worker: str, now: float) -> None:
        """Tell the policy, which places nothing there for now."""
        self._unanswered[worker] -= 1
        self._policy.refused(_wanted(job), worker, now)


def _wanted(job: Job) -> PlacementWanted:
    conversation, scope = job.conversation, PrefixScope()
    session_id = conversation.name if conversation.is_session else None
    pieces = piece_hashes(job.prompt, scope)
    return PlacementWanted.of(len(job.prompt), pieces, scope, session_id=session_id, group_id=conversation.group)
