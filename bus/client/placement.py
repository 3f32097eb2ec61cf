"""Places requests at workers, and lets requests follow another request of their group. Runs on the bus thread.

`PlacementPolicy` chooses the worker of a due request. This module reports sent requests and presence to it. If no
worker has room for a group, its first request goes to the queue, and the others follow to the worker that admits the
first.
"""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Final, Literal, NamedTuple

import numpy as np

from ...schemas.errors import ErrorCode, RequestError
from ...schemas.presence import WorkerPresence
from ..protocol.attempt.machine import UNPUBLISHED
from ..protocol.fleet.presence import FleetSnapshot, LostWorker, PresenceTable
from ..protocol.queue.fairness import MAX_FOLLOWERS
from ..protocol.queue.load import PIECE_TOKENS, PrefixScope, WorkerLoad, piece_hashes
from ..protocol.queue.placement import (
    NO_NEEDS,
    QUEUED,
    SIBLINGS_PER_PIECE,
    GroupLeaders,
    ModelPolicies,
    PlacedRequest,
    Placement,
    PlacementNeeds,
    PlacementReason,
    may_wait,
)
from .config import ClientStats
from .coordinator import ChildRequest

MAX_REFUSALS: Final = 1
"""Rejections after which a request may still follow others of its group: one for room and one for a backlog."""


class Placed(NamedTuple):
    """Samples of one request with the same destination."""

    worker: str | None
    """Id of the worker. None: the queue, with one message for each sample."""
    children: Sequence[ChildRequest]


class RequestPlacement:
    """State of one client about prefixes, sessions, groups and loads, by model.

    Args:
        table: presence of the live workers.
        is_on: False: all requests go to the queue, and no state is kept.
    """

    def __init__(self, table: PresenceTable, stats: ClientStats, *, is_on: bool) -> None:
        self._table = table
        self.stats = stats
        self._is_on = is_on
        self._policies = ModelPolicies()
        self._serving: dict[str, list[WorkerLoad]] = {}
        self._seen: FleetSnapshot | None = None
        # The requests in flight bound these collections. A model without any has no entry.
        self._unanswered: Counter[str] = Counter()
        self._leaders: dict[str, GroupLeaders[ChildRequest]] = {}
        # Followers of admitted leaders, with the worker that admitted the leader.
        self._admitted: list[tuple[str, list[ChildRequest]]] = []
        self.silent: Collection[str] = frozenset()  # workers that get no requests

    def debug_state(self) -> dict[str, int]:
        """Return counts; see `Runtime.debug_state`."""
        followers = sum(map(len, self._leaders.values())) + sum(len(followers) for _, followers in self._admitted)
        return {"followers": followers}

    @property
    def has_due(self) -> bool:
        """True if `pop_followers` has requests to return."""
        if not self._leaders:
            return bool(self._admitted)
        return bool(self._admitted) or any(leaders.has_due for leaders in self._leaders.values())

    # Presence of workers.

    def update(self, presence: WorkerPresence) -> None:
        """Process the presence of a worker after the presence table has accepted it."""
        if self._is_on and self._table.get(presence.worker) is presence:
            now = time.monotonic()
            policy = self._policies.update(presence, now)
            # The worker published its room before it received the requests that it has not answered.
            for _ in range(self._unanswered[presence.worker]):
                policy.loads.placed(presence.worker, 0, now)

    def remove_worker(self, gone: LostWorker) -> None:
        """Remove a lost worker."""
        if gone.is_final:
            self._policies.remove(gone.worker)

    def reads_siblings(self, worker: str | None) -> bool:
        """Return True if several samples of a request may go to the worker in one message."""
        return worker is not None and self._presents(worker, "request_groups")

    def _presents(self, worker: str, capability: Literal["request_groups", "group_backlog"]) -> bool:
        presence = self._table.get(worker)
        return presence is not None and bool(getattr(presence.capabilities, capability, False))

    def _loads(self, model: str) -> list[WorkerLoad]:
        """Return the loads of the workers that serve whole requests."""
        if self._table.snapshot is not self._seen:
            self._seen, self._serving = self._table.snapshot, {}
        if model not in self._serving:
            workers = [worker.worker for worker in self._table.serving(model)]
            self._serving[model] = self._loads_of(model, workers)
        return self._serving[model]

    def _loads_of(self, model: str, workers: Sequence[str]) -> list[WorkerLoad]:
        known = map(self._policies.of(model).loads.get, workers)
        return [load for load in known if load is not None]

    # Decisions.

    def place(self, child: ChildRequest) -> Sequence[Placed]:
        """Place a due request and the other due samples of its call.

        Requests that are not returned follow another request of their group: `pop_followers` or `remove` returns them.
        """
        open_call, now = child.open_call, time.monotonic()
        leaders = self._leaders.get(open_call.model)
        if leaders is not None and child in leaders:
            return ()
        is_due = child.num_refusals <= MAX_REFUSALS and (
            child.is_first_attempt or open_call.call.request.session_id is not None
        )
        if not self._is_on or not is_due:
            return (Placed(None, [child]),)
        if leaders is not None and leaders.leads(child):
            # The connection did not accept the message.
            self._forget(child)
            leaders.queued.add(child)
            return (Placed(None, [child]),)
        if self._needs_nothing(child):
            child.wanted = NO_NEEDS
            self._forget(child)
            return self._queue((child,))
        able, wanted = self._collect_candidates(child, self._loads(open_call.model))
        child.wanted = wanted
        siblings = [child]
        if len(open_call.children) > 1:
            siblings = [other for other in open_call.children if self._is_due_with(other, child)]
        for other in siblings:
            self._forget(other)
        # Each worker computes a prompt that is too short to be cached. Requests in the queue go first.
        is_group = wanted.group is not None and bool(wanted.pieces) and child.is_first_attempt
        placements: Sequence[Placement] = ()
        if not child.num_refusals and not (is_group and self._has_queued_leader(open_call.model)):
            policy = self._policies.of(open_call.model)
            if len(siblings) > 1:
                placements = policy.place_group(wanted, len(siblings), able, now)
            else:
                placements = [policy.place(wanted, able, now)]
        placed = self._note_all(siblings, placements, wanted, now)
        left = [other for other in siblings if other.placed is None]
        if not is_group:
            return *placed, *(self._keep(left, wanted, able, now) or self._queue(left))
        if placed:
            leader = placed[0].children[0]
            self._leaders_of(leader).add_leader(wanted.group or 0, leader, leader.lane)
        return *placed, *self._follow(left, wanted)

    def _keep(
        self, children: Sequence[ChildRequest], wanted: PlacementNeeds, able: Sequence[WorkerLoad], now: float
    ) -> list[Placed]:
        """Send a turn of a session to the full worker of its last turn, where it waits. Return [] for the queue."""
        if len(children) != 1 or children[0].num_refusals:
            return []
        kept = self._policies.of(children[0].open_call.model).keep_place(wanted, able, now)
        if kept.worker is None or not self._presents(kept.worker, "group_backlog"):
            return []
        self._note(children[0], kept, wanted, now)
        return [Placed(kept.worker, children)]

    def _is_due_with(self, other: ChildRequest, child: ChildRequest) -> bool:
        """Return True if both requests go out together: they must have the same number of rejections."""
        is_equal = other.state is child.state and other.num_refusals == child.num_refusals
        return other is child or (child.is_first_attempt and other.is_first_attempt and is_equal)

    def _follow(self, children: Sequence[ChildRequest], wanted: PlacementNeeds) -> list[Placed]:
        """Let requests follow the leader of their group. Return the requests that must lead, for the queue."""
        limit = min(MAX_FOLLOWERS, SIBLINGS_PER_PIECE * len(wanted.pieces) - 1)
        queued: list[Placed] = []
        for child in children:
            if self._leaders_of(child).add(wanted.group or 0, child, child.lane, limit):
                queued += self._lead([child])
        return queued

    def _leaders_of(self, child: ChildRequest) -> GroupLeaders[ChildRequest]:
        return self._leaders.setdefault(child.open_call.model, GroupLeaders())

    def _lead(self, children: Sequence[ChildRequest]) -> list[Placed]:
        for child in children:
            self._leaders_of(child).queued.add(child)
        return self._queue(children)

    def _has_queued_leader(self, model: str) -> bool:
        return model in self._leaders and bool(self._leaders[model].queued)

    def pop_followers(self) -> list[Placed]:
        """Return followers of admitted leaders, for a worker with room, and leaders for which the queue has room."""
        admitted, self._admitted = self._admitted, []
        found = [placed for leaders in self._leaders.values() for placed in self._lead(leaders.pop_due())]
        for worker, followers in admitted:
            waiting = [child for child in followers if child.state in UNPUBLISHED]
            for _, children in groupby(waiting, lambda child: child.open_call):
                found += self._place_followers(list(children), worker, time.monotonic())
        return found

    def _place_followers(self, children: Sequence[ChildRequest], worker: str, now: float) -> list[Placed]:
        model = children[0].open_call.model
        able, wanted = self._collect_candidates(children[0], self._loads(model))
        placements: list[Placement] = []
        if not self._has_queued_leader(model):
            # No request of this client goes first.
            placements = self._policies.of(model).place_group(wanted, len(children), able, now)
        placed = self._note_all(children, placements, wanted, now)
        left = [child for child in children if child.placed is None]
        if left and self._presents(worker, "group_backlog") and worker in (load.worker for load in able):
            placement = Placement(worker, PlacementReason.PLACED_GROUP, len(wanted.pieces) * PIECE_TOKENS)
            for child in left:
                self._note(child, placement, wanted, now)
            return [*placed, Placed(worker, left)]
        return [*placed, *self._queue(left)]

    def may_wait(self, child: ChildRequest) -> bool:
        """Return True if a placed request may wait at its worker: behind its group, or at its session's cache."""
        held = child.placed
        if held is None or not may_wait(held.wanted, held.placement or QUEUED):
            return False
        return self._presents(held.worker, "group_backlog")

    def reason(self, child: ChildRequest) -> str:
        """Return the reason for the placement of a request. Empty if it was not placed."""
        return "" if child.placed is None or child.placed.placement is None else child.placed.placement.reason

    def _queue(self, children: Sequence[ChildRequest]) -> list[Placed]:
        queued = []
        for child in children:
            # Rejected requests were already counted when they were placed.
            self.stats.placed[PlacementReason.QUEUED] += not child.num_refusals
            queued.append(Placed(None, (child,)))
        return queued

    def _collect_candidates(
        self, child: ChildRequest, loads: Sequence[WorkerLoad]
    ) -> tuple[Sequence[WorkerLoad], PlacementNeeds]:
        """Return the workers that can serve a request, and the input of its placement."""
        asked = child.stream.asked
        version, lora = asked.min_weight_version or 0, asked.lora
        able = loads
        if version or lora is not None or self.silent:
            able = [load for load in loads if load.has(version, lora) and load.worker not in self.silent]
        # An adapter may have the model's name.
        name = lora or child.open_call.model
        lora_version = max([load.loras.get(name, 0) for load in able if load.loras], default=0)
        scope = PrefixScope(lora, lora_version, asked.cache_salt)
        prompt_len = asked.prompt_len
        group_id = asked.group_id
        if group_id is None and len(child.open_call.children) > 1:
            group_id = child.open_call.request_id
        wanted = PlacementNeeds(
            prompt_len,
            self._pieces(child, scope) if prompt_len >= PIECE_TOKENS else (),
            scope,
            session_id=asked.session_id,
            group_id=group_id,
            is_for_able_only=len(able) < len(loads),
        )
        return able, wanted

    def _needs_nothing(self, child: ChildRequest) -> bool:
        """Return True if no worker can be better for a request than another."""
        asked = child.stream.asked
        return (
            len(asked.prompt_token_ids) < PIECE_TOKENS
            and asked.session_id is None
            and asked.group_id is None
            and asked.lora is None
            and not (asked.min_weight_version or self.silent)
            and len(child.open_call.children) == 1
        )

    def _pieces(self, child: ChildRequest, scope: PrefixScope) -> tuple[int, ...]:
        """Return the hashes of a prompt. They are computed once for all samples of a request."""
        open_call, asked = child.open_call, child.stream.asked
        prompt = np.asarray(asked.prompt_token_ids, np.int32)
        if not child.is_first_attempt:
            return piece_hashes(prompt, scope)
        if open_call.pieces is None or open_call.pieces[0] != scope:
            open_call.pieces = scope, piece_hashes(prompt, scope)
        return open_call.pieces[1]

    def _note_all(
        self,
        children: Sequence[ChildRequest],
        placements: Sequence[Placement],
        wanted: PlacementNeeds,
        now: float,
    ) -> list[Placed]:
        """Record placements while their workers have room. Return the placed samples by worker."""
        loads = self._policies.of(children[0].open_call.model).loads
        together: dict[str, list[ChildRequest]] = {}
        for child, placement in zip(children, placements, strict=False):
            self._forget(child)
            if placement.worker is not None and loads.free_slots(placement.worker, now) > 0:
                self._note(child, placement, wanted, now)
                together.setdefault(placement.worker, []).append(child)
        return [Placed(worker, found) for worker, found in together.items()]

    def _note(self, child: ChildRequest, placement: Placement, wanted: PlacementNeeds, now: float) -> None:
        self.stats.placed[placement.reason] += 1
        self._policies.of(child.open_call.model).placed(wanted, placement, now)
        child.placed = PlacedRequest(placement.worker or "", wanted, placement)
        self._unanswered[child.placed.worker] += 1

    def _note_answer(self, held: PlacedRequest) -> None:
        """Record that the worker has answered, or will not receive the request."""
        if held.placement is not None and not held.is_admitted:
            self._unanswered[held.worker] -= 1
            if not self._unanswered[held.worker]:
                del self._unanswered[held.worker]

    def _forget(self, child: ChildRequest) -> None:
        """Remove the placement of a request whose message the connection did not accept."""
        held, child.placed = child.placed, None
        if held is not None:
            self._note_answer(held)
            self._policies.of(child.open_call.model).loads.ended(held.worker)

    # Prefill phases, which have their own queue.

    def prefer_prefill(self, child: ChildRequest, workers: Sequence[str]) -> str | None:
        """Return the prefill worker with the best cache for a request's prompt. None: any worker is equally good."""
        if not self._is_on:
            return None
        able, wanted = self._collect_candidates(child, self._loads_of(child.open_call.model, workers))
        return self._policies.of(child.open_call.model).place(wanted, able, time.monotonic()).worker

    def record_prefill(self, child: ChildRequest, worker: str) -> None:
        """Record that this prefill worker computes the prompt of a request."""
        if self._is_on:
            _, wanted = self._collect_candidates(child, self._loads_of(child.open_call.model, [worker]))
            now = time.monotonic()
            cached = self._policies.of(child.open_call.model).index.longest(wanted.pieces, now).get(worker, 0)
            reason = PlacementReason.PLACED_PREFIX if cached else PlacementReason.PLACED_GROUP
            self._note(child, Placement(worker, reason, cached), wanted, now)

    # Results.

    def record_admission(self, child: ChildRequest) -> None:
        """Record that a worker admitted the request: its cache will contain the prompt."""
        if not self._is_on or child.worker is None:
            return
        held = child.placed
        was_placed = held is not None
        if held is None:
            wanted = child.wanted or self._collect_candidates(child, self._loads(child.open_call.model))[1]
            held = child.placed = PlacedRequest(child.worker, wanted, None)
        if followers := self._end_lead(child) if self._leaders else None:
            self._admitted.append((child.worker, followers))
        if was_placed:
            self._note_answer(held)
        policy, now = self._policies.of(child.open_call.model), time.monotonic()
        held.is_admitted = True
        if held.wanted is NO_NEEDS:
            policy.loads.placed(held.worker, len(child.stream.asked.prompt_token_ids), now)
            held.cache = policy.index.cache_of(held.worker)
        else:
            held.cache = policy.admitted(held.wanted, held.worker, now, was_placed=was_placed)

    def remove(self, child: ChildRequest, refusal: RequestError | None) -> list[ChildRequest]:
        """Remove the request of an ended attempt.

        Args:
            refusal: reason why no worker accepted it. None: it was accepted, or the call has ended.

        Returns:
            Requests that followed it and are due now.
        """
        held = child.placed
        child.placed = child.wanted = None
        followers = self._end_lead(child) if self._leaders else []
        if held is not None:
            self._note_answer(held)
            self._settle(child, held, refusal)
        return followers

    def _end_lead(self, child: ChildRequest) -> list[ChildRequest]:
        """Remove a request as leader and follower, and return its followers."""
        model = child.open_call.model
        leaders = self._leaders.get(model)
        if leaders is None:
            return []
        followers = leaders.remove(child)
        if leaders.is_empty:
            del self._leaders[model]
        return followers

    def _settle(self, child: ChildRequest, held: PlacedRequest, refusal: RequestError | None) -> None:
        policy, stream, now = self._policies.of(child.open_call.model), child.stream, time.monotonic()
        self.stats.placements_refused += refusal is not None
        if refusal is not None and not held.is_admitted:
            answer = policy.silent if refusal.code is ErrorCode.WORKER_LOST else policy.refused
            answer(held.wanted, held.worker, now)
        elif stream.end is None or held.cache is None:
            policy.loads.ended(held.worker)
        else:
            pieces: tuple[int, ...] = ()
            if len(stream.asked.prompt_token_ids) + stream.num_tokens >= PIECE_TOKENS:
                wanted = held.wanted
                if wanted is NO_NEEDS:
                    wanted = self._collect_candidates(child, self._loads(child.open_call.model))[1]
                pieces = piece_hashes(stream.sequence(), wanted.scope)
            policy.ended(held.cache, pieces, now)
            if held.placement is not None and stream.end.cached_tokens is not None:
                self.stats.expected_cached_tokens += held.placement.cached_tokens
                self.stats.placed_cached_tokens += stream.end.cached_tokens
