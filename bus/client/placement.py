"""At which workers requests are placed, and which of them wait for the worker of their group. On the bus thread.

`PlacementPolicy` decides where a request goes that is due. This part tells it what the client sends and sees, and gives
room that workers have to the groups that wait in `GroupLine`: first to those whose prompt the worker has.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from ...schemas.errors import ErrorCode, RequestError
from ...schemas.presence import WorkerPresence
from ..protocol.fleet.presence_table import FleetSnapshot, LostWorker, PresenceTable
from ..protocol.placement.group_line import GroupLine
from ..protocol.placement.policy import Placement, PlacementPolicy, PlacementReason, PlacementWanted
from ..protocol.placement.prefix_index import PIECE_TOKENS, CacheId, PrefixScope, piece_hashes
from ..protocol.placement.worker_load import WorkerLoad
from .children import ChildRequest

__all__ = ["Placed", "PlacementStats", "RequestPlacement"]

MAX_LOOKED_AT: Final = 32
"""Groups that are looked at when a worker has room: some hundred microseconds, however long the line is."""


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
        self._unanswered: Counter[str] = Counter()
        self._lines: dict[str, GroupLine[ChildRequest]] = {}
        # By model: the request that looks for a worker through the queue, for the groups that wait.
        self._scouts: dict[str, ChildRequest] = {}
        self.stats = PlacementStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<RequestPlacement held={len(self._held)} waiting={self.num_waiting}>"

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the worker of their group."""
        return sum(map(len, self._lines.values()))

    # What workers announce.

    def update(self, presence: WorkerPresence) -> None:
        """Take the announcement of a worker that the table has taken."""
        if self._is_on and self._table.get(presence.worker) is presence:
            policy, now = self._policy(presence.model), time.monotonic()
            policy.update(presence, now)
            # What it has not answered yet had not come when it announced its room.
            for _ in range(self._unanswered[presence.worker]):
                policy.loads.placed(presence.worker, 0, now)

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

        A request of which nothing is returned waits for the worker of its group, until `pop_placed` returns it.
        """
        open_call, now = child.open_call, time.monotonic()
        line = self._lines.setdefault(open_call.model, GroupLine())
        if child in line:
            return ()
        is_due = child.may_be_placed and (child.is_first_attempt or open_call.call.request.session_id is not None)
        if not self._is_on or not is_due:
            return (Placed(None, [child]),)
        able, wanted, scope = self._wanted(child, self._loads(open_call.model))
        siblings = [other for other in open_call.children if self._is_due_with(other, child)]
        policy = self._policy(open_call.model)
        # A prompt that is too short to be remembered is not worth a wait.
        may_wait = wanted.group is not None and bool(wanted.pieces)
        if may_wait and len(line):
            placements: Sequence[Placement] = ()
        elif len(siblings) > 1:
            placements = policy.place_group(wanted, len(siblings), able, now)
        else:
            placements = [policy.place(wanted, able, now)]
        placed = self._note_all(siblings, placements, wanted, scope, now)
        left = [other for other in siblings if other not in self._held]
        if may_wait:
            for other in left:
                line.add(other.lane, wanted.group or 0, other, now)
            return placed
        return *placed, *self._queue(left)

    def _is_due_with(self, other: ChildRequest, child: ChildRequest) -> bool:
        is_equal = other.state is child.state and other.is_first_attempt and other.may_be_placed
        return other is child or (child.is_first_attempt and is_equal)

    def _queue(self, children: Sequence[ChildRequest]) -> list[Placed]:
        self.stats.placed[PlacementReason.QUEUED] += len(children)
        return [Placed(None, [child]) for child in children]

    def _wanted(
        self, child: ChildRequest, loads: Sequence[WorkerLoad]
    ) -> tuple[list[WorkerLoad], PlacementWanted, PrefixScope]:
        """Return which of these workers can serve a request, what its placement depends on, and its scope."""
        asked = child.stream.asked
        version, lora = asked.min_weight_version or 0, asked.lora
        able = [load for load in loads if load.weight_version >= version and (lora is None or lora in load.loras)]
        lora_version = 0 if lora is None else max((load.loras[lora] for load in able), default=0)
        scope = PrefixScope(lora, lora_version, asked.cache_salt)
        group_id = asked.group_id
        if group_id is None and len(child.open_call.children) > 1:
            group_id = child.open_call.request_id
        wanted = PlacementWanted.of(
            asked.prompt_len,
            self._pieces(child, scope),
            scope,
            session_id=asked.session_id,
            group_id=group_id,
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

    def _note_all(
        self,
        children: Sequence[ChildRequest],
        placements: Sequence[Placement],
        wanted: PlacementWanted,
        scope: PrefixScope,
        now: float,
    ) -> list[Placed]:
        """Note where samples of one request go, as far as their workers have room; returns them by worker."""
        loads = self._policy(children[0].open_call.model).loads
        together: dict[str, list[ChildRequest]] = {}
        for child, placement in zip(children, placements, strict=False):
            self._forget(child)
            if placement.worker is not None and loads.free_slots(placement.worker, now) > 0:
                self._note(child, placement, wanted, scope, now)
                together.setdefault(placement.worker, []).append(child)
        return [Placed(worker, found) for worker, found in together.items()]

    def _note(
        self, child: ChildRequest, placement: Placement, wanted: PlacementWanted, scope: PrefixScope, now: float
    ) -> None:
        self.stats.placed[placement.reason] += 1
        self._policy(child.open_call.model).placed(wanted, placement, now)
        held = self._held[child] = _Held(placement.worker or "", wanted, scope, placement.cached_tokens)
        self._unanswered[held.worker] += 1

    def _note_answer(self, held: _Held) -> None:
        """Its worker has it, or will not get it."""
        if held.expected is not None and not held.is_admitted:
            self._unanswered[held.worker] -= 1
            if not self._unanswered[held.worker]:
                del self._unanswered[held.worker]

    def _forget(self, child: ChildRequest) -> None:
        """It is not where it was placed: the connection did not take its message."""
        held = self._held.pop(child, None)
        if held is not None:
            self._note_answer(held)
            self._policy(child.open_call.model).loads.ended(held.worker)

    # Groups that wait.

    def pop_placed(self) -> list[Placed]:
        """Return the requests that wait no longer: workers have room for them, or had none for long."""
        now = time.monotonic()
        return [placed for model, line in self._lines.items() if len(line) for placed in self._pop(model, line, now)]

    def _pop(self, model: str, line: GroupLine[ChildRequest], now: float) -> list[Placed]:
        found = self._queue(line.pop_late(now))
        for _, children in self._while_room(model, line, now):
            found += self._give_room(children, self._holders(children[0], now), line, now)
        # Room that is left is of no use to groups whose worker is full, unless it is worth another prompt.
        for _, children in self._while_room(model, line, now):
            others = children[len(children) // 2 :]
            if len(others) > 1 and self._holders(children[0], now):
                found += self._give_room(others, frozenset(), line, now, min_room=2)
        first = line.first(MAX_LOOKED_AT) if model not in self._scouts else []
        if first and not any(self._holders(children[0], now) for _, children in first):
            # Workers may have room that they have not announced yet.
            [(_, [scout, *_]), *_] = first
            line.remove(scout)
            self._scouts[model] = scout
            found += self._queue([scout])
        return found

    def _while_room(
        self, model: str, line: GroupLine[ChildRequest], now: float
    ) -> Iterator[tuple[int, list[ChildRequest]]]:
        """Yield the first groups of a line, as long as some worker has room."""
        loads = self._loads(model)
        for group in line.first(MAX_LOOKED_AT):
            if all(load.room(now) <= 0 for load in loads):
                return
            yield group

    def _holders(self, child: ChildRequest, now: float) -> set[str]:
        """Return the workers that have the prompt of a group, or compute it."""
        _, wanted, _ = self._wanted(child, self._loads(child.open_call.model))
        index, whole = self._policy(child.open_call.model).index, len(wanted.pieces) * PIECE_TOKENS
        holders = {worker for worker, cached in index.longest(wanted.pieces, now).items() if cached >= whole}
        last = None if wanted.group is None else index.last_holder(wanted.group, now)
        return holders if last is None else holders | {last}

    def _give_room(
        self,
        children: Sequence[ChildRequest],
        holders: Set[str],
        line: GroupLine[ChildRequest],
        now: float,
        min_room: int = 1,
    ) -> list[Placed]:
        """Place requests of one group that wait: at workers that have their prompt, else where there is most room."""
        able, wanted, _ = self._wanted(children[0], self._loads(children[0].open_call.model))
        free = [load for load in able if load.room(now) >= min_room and (not holders or load.worker in holders)]
        if not free:
            return []
        free.sort(key=lambda load: -load.room(now))
        whole = len(wanted.pieces) * PIECE_TOKENS
        rooms = [load.worker for load in free[: None if holders else 1] for _ in range(load.room(now))]
        placements = [
            Placement(worker, PlacementReason.PLACED_GROUP, whole if i or holders else 0)
            for i, worker in enumerate(rooms)
        ]
        found: list[Placed] = []
        for _, calls in groupby(children[: len(placements)], lambda child: child.open_call):
            samples = list(calls)
            _, wanted, scope = self._wanted(samples[0], able)
            found += self._note_all(samples, placements[: len(samples)], wanted, scope, now)
            del placements[: len(samples)]
        for child in (child for placed in found for child in placed.children):
            line.remove(child)
        if self._has_most(children[0].open_call.model):
            line.note_room(now)
        return found

    def _has_most(self, model: str) -> bool:
        """Return True if at least half of what the workers of a model run is this client's."""
        return 2 * len(self._held) >= sum(load.running for load in self._loads(model))

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
        self._end_scout(child)
        self._note_answer(held)
        policy = self._policy(child.open_call.model)
        held.is_admitted = True
        held.cache = policy.admitted(held.wanted, held.worker, time.monotonic(), was_placed=was_placed)

    def remove(self, child: ChildRequest, refusal: RequestError | None) -> None:
        """Its attempt is over, and it waits for nothing.

        Args:
            refusal: why nobody took it; None: it was taken, or nobody wants it any more.
        """
        line = self._lines.get(child.open_call.model)
        if line is not None:
            line.remove(child)
        if refusal is None:
            self._end_scout(child)
        held = self._held.pop(child, None)
        if held is not None:
            self._note_answer(held)
            self._settle(child, held, refusal)

    def _end_scout(self, child: ChildRequest) -> None:
        model = child.open_call.model
        if self._scouts.get(model) is child:
            del self._scouts[model]
            self._lines[model].note_room(time.monotonic())

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
