"""The simulated ways to choose a worker of `bench.placement`. Each class is a `QueueOnly` of `bench.placement_sim`."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from bench.placement_sim import Job, QueueOnly
from bench.placement_traces import Conversation
from rollbus.bus.protocol.queue.load import PIECE_TOKENS, CacheId, PrefixScope, WorkerLoad, piece_hashes
from rollbus.bus.protocol.queue.placement import (
    Placement,
    PlacementNeeds,
    PlacementPolicy,
    PlacementReason,
    may_wait,
    rendezvous,
)
from rollbus.schemas.presence import WorkerPresence


def session_of(conversation: Conversation) -> str:
    """Return the name that requests with common tokens share: their group, or the name of the conversation."""
    return conversation.group or conversation.name


class Static(QueueOnly):
    """Chooses the worker by the hash of the group or conversation. The request waits there."""

    waits_at_worker = True

    def __init__(self) -> None:
        self._workers: dict[str, None] = {}
        self._chosen: defaultdict[str, str] = defaultdict(str)

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Add the worker if it is new."""
        self._workers.setdefault(presence.worker)

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the worker that the hash chooses."""
        session = session_of(job.conversation)
        worker = self._chosen[session] = self._chosen[session] or rendezvous(session, self._workers)
        return [worker] * count


class RoundRobin(QueueOnly):
    """Chooses one worker after the other. The request waits there."""

    waits_at_worker = True

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        """Requests in flight at each worker, in the order in which the workers were chosen last."""

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Add the worker if it is new."""
        self._requests.setdefault(presence.worker, 0)

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the next worker for all samples."""
        worker = self._choose(job)
        self._requests[worker] = self._requests.pop(worker) + count
        return [worker] * count

    def _choose(self, job: Job) -> str:
        return next(iter(self._requests))

    def ended(self, job: Job, worker: str, now: float) -> None:
        """Count the request that has ended."""
        self._requests[worker] -= 1


class LeastLoaded(RoundRobin):
    """Chooses the worker with the fewest open sessions for a new session, and the same worker until its end.

    The rule is that of `sticky_least_loaded` in vLLM's router (vllm-project/router 235, prime-rl 3563).
    """

    margin: float = math.inf
    """Requests in flight above those of the worker with the fewest, at which the session moves there."""

    def __init__(self) -> None:
        super().__init__()
        self._chosen: dict[str, str] = {}

    def _choose(self, job: Job) -> str:
        session, requests = session_of(job.conversation), self._requests
        worker = self._chosen.get(session)
        if worker is None:
            sessions = Counter(self._chosen.values())
            worker = min(requests, key=sessions.__getitem__)
        elif requests[worker] - min(requests.values()) > self.margin:
            worker = min(requests, key=requests.__getitem__)
        self._chosen[session] = worker
        return worker

    def ended(self, job: Job, worker: str, now: float) -> None:
        """Count the request, and forget the session after its last turn."""
        super().ended(job, worker, now)
        if job.turn + 1 == len(job.conversation.turns):
            self._chosen.pop(session_of(job.conversation), None)


class Moving(LeastLoaded):
    """The rule `LeastLoaded`, but a session leaves a worker with many more requests than another (verl 7435)."""

    margin = 2


class Simple(QueueOnly):
    """Sends a request to the worker that the hash of its session, group or prefix chooses.

    Samples for which this worker has announced no free slots go to the queue, and so do those that it rejects.
    """

    spills = False
    """True: the next workers in the order of the hash come before the queue."""

    def __init__(self) -> None:
        self._free: dict[str, int] = {}

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Store the free slots of the worker."""
        self._free[presence.worker] = presence.free_slots

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the worker of one sample after the other, or None for the queue."""
        conversation, pieces = job.conversation, piece_hashes(job.prompt, PrefixScope())
        session = conversation.group or (conversation.name if conversation.is_session else None)
        key = session or str(pieces[0] if pieces else hash(job.prompt.tobytes()))
        able = dict.fromkeys(self._free)
        workers: list[str | None] = []
        while able and len(workers) < count:
            worker = rendezvous(key, able)
            del able[worker]
            num_placed = min(max(self._free[worker], 0), count - len(workers))
            self._free[worker] -= num_placed
            workers += [worker] * num_placed
            if not self.spills:
                break
        return workers + [None] * (count - len(workers))

    def admitted(self, job: Job, worker: str, now: float) -> None:
        """Count a request that the worker got from the queue."""
        self._free[worker] -= not job.is_placed

    def ended(self, job: Job, worker: str, now: float) -> None:
        """Count the slot that is free again."""
        self._free[worker] += 1

    def refused(self, job: Job, worker: str, now: float) -> None:
        """Place nothing there until the next presence with free slots, or the next end."""
        self._free[worker] = min(self._free[worker], 0)


class Spill(Simple):
    """The rule `Simple`, but the next workers in the order of the hash come before the queue."""

    spills = True


class Ours(QueueOnly):
    """Uses the policy of `rollbus.bus.protocol.queue.placement` with the information that a client has."""

    follows = True

    def __init__(self) -> None:
        self._policy = PlacementPolicy()
        self._caches: dict[Job, CacheId | None] = {}
        self._waiting: set[Job] = set()
        self._able: dict[str, WorkerLoad] = {}
        self._unanswered: Counter[str] = Counter()

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Pass the presence to the policy."""
        self._policy.update(presence, now)
        # Requests that the worker has not answered yet had not arrived when it published this presence.
        for _ in range(self._unanswered[presence.worker]):
            self._policy.loads.placed(presence.worker, 0, now)
        load = self._policy.loads.get(presence.worker)
        if load is not None:
            self._able[presence.worker] = load

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the workers that the policy chooses."""
        wanted, able = _wanted(job), list(self._able.values())
        if count == 1:
            placement = self._policy.place(wanted, able, now)
            if placement.worker is None:
                placement = self._policy.keep_place(wanted, able, now)
            if placement.worker is not None and wanted.group is None and may_wait(wanted, placement):
                self._waiting.add(job)
            placements = [placement]
        else:
            placements = self._policy.place_group(wanted, count, able, now)
        for placement in placements:
            self._note(wanted, placement, now)
        return [placement.worker for placement in placements]

    def _note(self, wanted: PlacementNeeds, placement: Placement, now: float) -> None:
        self._policy.placed(wanted, placement, now)
        if placement.worker is not None:
            self._unanswered[placement.worker] += 1

    def may_wait(self, job: Job) -> bool:
        """Return True if the job is a turn of a session that waits at its worker's cache."""
        return job in self._waiting

    def follow(self, job: Job, worker: str, now: float, *, is_queueing: bool) -> str:
        """Return another worker with free slots if no request waits, otherwise the worker that has the prompt."""
        wanted = _wanted(job)
        placement = Placement(worker, PlacementReason.PLACED_GROUP, len(wanted.pieces) * PIECE_TOKENS)
        if not is_queueing:
            free = self._policy.place(wanted, list(self._able.values()), now)
            placement = placement if free.worker is None else free
        self._note(wanted, placement, now)
        return placement.worker or worker

    def admitted(self, job: Job, worker: str, now: float) -> None:
        """Pass the admission to the policy, which stores the prompt."""
        self._unanswered[worker] -= job.is_placed
        self._waiting.discard(job)
        self._caches[job] = self._policy.admitted(_wanted(job), worker, now, was_placed=job.is_placed)

    def ended(self, job: Job, worker: str, now: float) -> None:
        """Pass the end to the policy, which stores all tokens."""
        cache = self._caches.pop(job)
        if cache is not None:
            self._policy.ended(cache, piece_hashes(job.sequence, PrefixScope()), now)

    def refused(self, job: Job, worker: str, now: float) -> None:
        """Pass the rejection to the policy, which places no request at this worker for some time."""
        self._unanswered[worker] -= 1
        self._waiting.discard(job)
        self._policy.refused(_wanted(job), worker, now)


def _wanted(job: Job) -> PlacementNeeds:
    conversation, scope = job.conversation, PrefixScope()
    session_id = conversation.name if conversation.is_session else None
    pieces = piece_hashes(job.prompt, scope)
    return PlacementNeeds(len(job.prompt), pieces, scope, session_id=session_id, group_id=conversation.group)
