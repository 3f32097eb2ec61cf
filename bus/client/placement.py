"""At which workers requests are placed, and which of them wait for the first of their group. On the bus thread.

The decisions are those of `PlacementPolicy` and `Followers`. This part tells them what the client sends and sees.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...schemas.errors import ErrorCode, RequestError
from ...schemas.presence import WorkerPresence
from ..protocol.fleet.presence_table import FleetSnapshot, LostWorker, PresenceTable
from ..protocol.placement.followers import Followers
from ..protocol.placement.policy import Placement, PlacementPolicy, PlacementReason, PlacementWanted
from ..protocol.placement.prefix_index import PIECE_TOKENS, CacheId, PrefixScope, hint_hash, piece_hashes
from ..protocol.placement.worker_load import WorkerLoad
from .children import ChildRequest

__all__ = ["Placed", "PlacementStats", "RequestPlacement"]

QUEUED = Placement(None, PlacementReason.QUEUED)


@dataclass(slots=True)
class PlacementStats:
    """Counters of placement, as in `ClientStats`."""

    placed: dict[str, int] = field(default_factory=lambda: {str(reason): 0 for reason in PlacementReason})
    placements_refused: int = 0
    expected_cached_tokens: int = 0
    placed_cached_tokens: int = 0


class Placed(NamedTuple):
    """Samples of one request that go the same way."""

    worker: str | None
    """None: to the queue, each by itself."""
    children: Sequence[ChildRequest]


@dataclass(slots=True)
class _Held:
    """A request that a worker has, or was sent."""

    worker: str
    wanted: PlacementWanted
    scope: PrefixScope
    expected: int | None
    """Prompt tokens that should be in the worker's cache; None: the worker got it from the queue."""
    is_admitted: bool = False
    cache: CacheId | None = None
    """The cache that holds its prompt; None: not known, as for what was not admitted."""


class RequestPlacement:
    """What one client knows of prefixes, sessions, groups and loads, by model.

    Args:
        table: the live workers.
        is_on: False: everything goes to the queue, and nothing is remembered.
    """

    def __init__(self, table: PresenceTable, *, is_on: bool) -> None:
        self._table = table
        self._is_on = is_on
        # By model; as many as workers serve.
        self._policies: dict[str, PlacementPolicy] = {}
        self._serving: dict[str, list[WorkerLoad]] = {}
        self._seen: FleetSnapshot | None = None
        # These are bounded by the requests in flight.
        self._held: dict[ChildRequest, _Held] = {}
        self._followers: Followers[ChildRequest] = Followers()
        # Where those go that have followed the first of their group; None: to the queue.
        self._decided: dict[ChildRequest, str | None] = {}
        self.stats = PlacementStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<RequestPlacement held={len(self._held)} {self._followers}>"

    # What workers announce.

    def update(self, presence: WorkerPresence) -> None:
        """Take the announcement of a worker that the table has taken."""
        if self._is_on and self._table.get(presence.worker) is presence:
            self._policy(presence.model).update(presence, time.monotonic())

    def remove_worker(self, gone: LostWorker) -> None:
        """A worker is gone."""
        if gone.is_final and gone.model in self._policies:
            self._policies[gone.model].remove(gone.worker)

    def reads_siblings(self, worker: str | None) -> bool:
        """Return True if several samples of a request may go to a worker in one message."""
        presence = None if worker is None else self._table.get(worker)
        return presence is not None and presence.capabilities is not None and presence.capabilities.request_groups

    def _policy(self, model: str) -> PlacementPolicy:
        return self._policies.setdefault(model, PlacementPolicy())

    def _loads(self, model: str) -> list[WorkerLoad]:
        """Return the loads of the workers that serve whole requests."""
        if self._table.snapshot is not self._seen:
            self._seen, self._serving = self._table.snapshot, {}
        if model not in self._serving:
            workers = [worker.worker for worker in self._table.serving(model)]
            self._serving[model] = self._loads_of(model, workers)
        return self._serving[model]

    def _loads_of(self, model: str, workers: Sequence[str]) -> list[WorkerLoad]:
        known = map(self._policy(model).loads.get, workers)
        return [load for load in known if load is not None]

    # Where requests go.

    def place(self, child: ChildRequest) -> Sequence[Placed]:
        """Decide where a request goes that is due, and the other samples of its call that are.

        A request of which nothing is returned follows the first of its group, until `release_to_worker` or another
        method returns it.
        """
        if child in self._followers:
            return ()
        if child in self._decided:
            return self._place_decided(child)
        request = child.open_call.call.request
        is_due = child.may_be_placed and (child.is_first_attempt or request.session_id is not None)
        if not self._is_on or not is_due:
            return (Placed(None, [child]),)
        able, wanted, scope = self._wanted(child, self._loads(child.open_call.model))
        siblings = [other for other in child.open_call.children if self._is_due_with(other, child)]
        policy, now = self._policy(child.open_call.model), time.monotonic()
        if len(siblings) > 1:
            placements = policy.place_group(wanted, len(siblings), able, now)
        else:
            placements = [policy.place(wanted, able, now)]
        return self._send_out(siblings, placements, wanted, scope, now)

    def _is_due_with(self, other: ChildRequest, child: ChildRequest) -> bool:
        is_equal = other.state is child.state and other.is_first_attempt and other.may_be_placed
        return other is child or (
            child.is_first_attempt and is_equal and other not in self._followers and other not in self._decided
        )

    def _wanted(
        self, child: ChildRequest, loads: Sequence[WorkerLoad]
    ) -> tuple[list[WorkerLoad], PlacementWanted, PrefixScope]:
        """Return which of these workers can serve a request, what its placement depends on, and its scope."""
        asked = child.stream.asked
        version, lora = asked.min_weight_version or 0, asked.lora
        able = [load for load in loads if load.weight_version >= version and (lora is None or lora in load.loras)]
        lora_version = 0 if lora is None else max((load.loras[lora] for load in able), default=0)
        scope = PrefixScope(lora, lora_version, asked.cache_salt)
        session, group = asked.session_id, asked.group_id
        if group is None and len(child.open_call.children) > 1:
            group = child.open_call.request_id
        wanted = PlacementWanted(
            prompt_tokens=asked.prompt_len,
            pieces=self._pieces(child, scope),
            session=None if session is None else hint_hash("session", session, scope),
            session_id=session,
            group=None if group is None else hint_hash("group", group, scope),
            is_for_able_only=len(able) < len(loads),
        )
        return able, wanted, scope

    def _pieces(self, child: ChildRequest, scope: PrefixScope) -> tuple[int, ...]:
        """Return the hashes of a prompt, which are made once for all samples of a request."""
        open_call, prompt = child.open_call, np.asarray(child.stream.asked.prompt_token_ids, np.int32)
        if not child.is_first_attempt:
            return piece_hashes(prompt, scope)
        if open_call.pieces is None or open_call.pieces[0] != scope:
            open_call.pieces = scope, piece_hashes(prompt, scope)
        return open_call.pieces[1]

    def _send_out(
        self,
        siblings: Sequence[ChildRequest],
        placements: Sequence[Placement],
        wanted: PlacementWanted,
        scope: PrefixScope,
        now: float,
        *,
        may_follow: bool = True,
    ) -> Sequence[Placed]:
        """Note where samples go; those that find no room follow the first of their group, if its prompt is unknown."""
        policy = self._policy(siblings[0].open_call.model)
        together: dict[str, list[ChildRequest]] = {}
        alone: list[Placed] = []
        for child, placement in zip(siblings, placements, strict=True):
            worker = placement.worker
            if worker is not None and policy.loads.free_slots(worker, now) > 0:
                self._note(child, placement, wanted, scope, now)
                together.setdefault(worker, []).append(child)
                self._lead(child, wanted)
            elif not (may_follow and self._follow(child, wanted, now)):
                self.stats.placed[PlacementReason.QUEUED] += 1
                alone.append(Placed(None, [child]))
        return *(Placed(worker, children) for worker, children in together.items()), *alone

    def _note(
        self, child: ChildRequest, placement: Placement, wanted: PlacementWanted, scope: PrefixScope, now: float
    ) -> None:
        policy = self._policy(child.open_call.model)
        if child in self._held:
            # The connection did not take its message.
            policy.loads.ended(self._held[child].worker)
        self.stats.placed[placement.reason] += 1
        policy.placed(wanted, placement, now)
        self._held[child] = _Held(placement.worker or "", wanted, scope, placement.cached_tokens)

    # Groups.

    def _lead(self, child: ChildRequest, wanted: PlacementWanted) -> None:
        group = child.open_call.model, wanted.group
        if wanted.group is not None and wanted.pieces and self._followers.leader(group) is None:
            self._followers.lead(group, child)

    def _follow(self, child: ChildRequest, wanted: PlacementWanted, now: float) -> bool:
        """Return True if the request is to wait for the first of its group; it may be that one from now on."""
        # A prompt that is too short to be remembered is not worth a wait.
        if wanted.group is None or not wanted.pieces or self._is_cached(child, wanted, now):
            return False
        leader = self._followers.leader((child.open_call.model, wanted.group))
        if leader is None or leader is child:
            self._lead(child, wanted)
            return False
        self._followers.follow(leader, child, now)
        return True

    def _is_cached(self, child: ChildRequest, wanted: PlacementWanted, now: float) -> bool:
        cached = self._policy(child.open_call.model).index.longest(wanted.pieces, now)
        return max(cached.values(), default=0) >= len(wanted.pieces) * PIECE_TOKENS

    def release_to_worker(self, leader: ChildRequest) -> list[ChildRequest]:
        """The first of a group has a token: return those that followed it, which go to its worker, if there is room."""
        return self._decide(self._followers.release(leader), leader.worker)

    def pop_late(self) -> list[ChildRequest]:
        """Return those that have followed for long enough: they go to the first one's worker, or to the queue."""
        late = self._followers.pop_late(time.monotonic())
        return [child for child, leader in late for child in self._decide([child], leader.worker)]

    def _decide(self, children: list[ChildRequest], worker: str | None) -> list[ChildRequest]:
        self._decided.update(dict.fromkeys(children, worker))
        return children

    def _place_decided(self, child: ChildRequest) -> Sequence[Placed]:
        """Send out one that has followed, with other samples of its call that go to the same worker."""
        worker, now = self._decided[child], time.monotonic()
        siblings = [other for other in child.open_call.children if self._decided.get(other, "") == worker]
        for other in siblings:
            del self._decided[other]
        _, wanted, scope = self._wanted(child, self._loads(child.open_call.model))
        placement = QUEUED
        if worker is not None:
            tokens = len(wanted.pieces) * PIECE_TOKENS
            placement = Placement(worker, PlacementReason.PLACED_GROUP, tokens)
        return self._send_out(siblings, [placement] * len(siblings), wanted, scope, now, may_follow=False)

    # Prefill legs, which have a line of their own.

    def prefer_leg(self, child: ChildRequest, workers: Sequence[str]) -> str | None:
        """Return at which of the prefill workers a request's prompt is best computed; None: any will do."""
        if not self._is_on:
            return None
        able, wanted, _ = self._wanted(child, self._loads_of(child.open_call.model, workers))
        return self._policy(child.open_call.model).place(wanted, able, time.monotonic()).worker

    def record_leg(self, child: ChildRequest, worker: str) -> None:
        """A request's prompt is to be computed by this prefill worker."""
        if self._is_on:
            _, wanted, scope = self._wanted(child, self._loads_of(child.open_call.model, [worker]))
            now = time.monotonic()
            cached = self._policy(child.open_call.model).index.longest(wanted.pieces, now).get(worker, 0)
            reason = PlacementReason.PLACED_PREFIX if cached else PlacementReason.PLACED_GROUP
            self._note(child, Placement(worker, reason, cached), wanted, scope, now)

    # What becomes of them.

    def record_admission(self, child: ChildRequest) -> None:
        """A worker has the request: its cache will hold the prompt."""
        if not self._is_on or child.worker is None:
            return
        held = self._held.get(child)
        was_placed = held is not None
        if held is None:
            _, wanted, scope = self._wanted(child, self._loads(child.open_call.model))
            held = self._held[child] = _Held(child.worker, wanted, scope, None)
        policy = self._policy(child.open_call.model)
        held.is_admitted = True
        held.cache = policy.admitted(held.wanted, held.worker, time.monotonic(), was_placed=was_placed)

    def remove(self, child: ChildRequest, refusal: RequestError | None) -> list[ChildRequest]:
        """Its attempt is over; returns those that followed it, which go to the queue if it has no worker.

        Args:
            refusal: why nobody took it; None: it was taken, or nobody wants it any more.
        """
        self._followers.remove(child)
        self._decided.pop(child, None)
        held = self._held.pop(child, None)
        if held is not None:
            self._settle(child, held, refusal)
        if refusal is not None:
            # It goes to the queue, where another worker may compute its prompt.
            return []
        return self._decide(self._followers.release(child), child.worker if child.stream.end is not None else None)

    def _settle(self, child: ChildRequest, held: _Held, refusal: RequestError | None) -> None:
        policy, stream, now = self._policy(child.open_call.model), child.stream, time.monotonic()
        if refusal is not None and not held.is_admitted:
            self.stats.placements_refused += 1
            answer = policy.silent if refusal.code is ErrorCode.WORKER_LOST else policy.refused
            answer(held.wanted, held.worker, now)
        elif stream.end is None or held.cache is None:
            policy.loads.ended(held.worker)
        else:
            policy.ended(held.cache, piece_hashes(stream.sequence(), held.scope), now)
            if held.expected is not None and stream.end.cached_tokens is not None:
                self.stats.expected_cached_tokens += held.expected
                self.stats.placed_cached_tokens += stream.end.cached_tokens
