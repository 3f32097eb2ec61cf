"""Publishes requests to workers, through the queue or directly to a worker. Runs on the bus thread.

Invariant: an open request that no worker has admitted is in one of six places: pending here, waiting for a prefill
worker, behind the leader of its group, on its way to the queue, in the queue, or on its way to the worker at which it
was placed. A request that has left the queue without a worker's offer is an orphan. It is published again.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from ...schemas.errors import BusBroken, ErrorCode, NoWorkers, RequestError, request_error
from ...schemas.messages import KvTransfer, RequestMessage, Sibling, encode
from ...schemas.presence import WorkerPresence
from ...schemas.request import Lane
from ...schemas.telemetry import LostAttempt
from ..nats.connection import Connection, publish
from ..protocol.attempt import events as on
from ..protocol.attempt.events import Event, PrefillDecided
from ..protocol.attempt.machine import UNPUBLISHED, RequestState
from ..protocol.attempt.suspects import able_others
from ..protocol.fleet.presence import UnservedModels, connector_of
from ..protocol.queue.prefill_queue import PrefillFallback, PrefillQueue, PrefillRequirements, PrefillWorkerInfo
from ..queue.publisher import PublishResult, QueuePublisher
from ..queue.streams import StoredRange, stored_in
from .config import ClientConfig, DurationsByModel
from .coordinator import AttemptCoordinator, ChildRequest, OpenCall
from .placement import Placed, RequestPlacement
from .presence import PresenceWatcher

logger = logging.getLogger(__name__)

MIN_LOOK_S: Final = 0.01
"""Minimum seconds between two timed checks of waiting requests."""
ORPHAN_AGE_S: Final = 10.0
"""Seconds that a request waits in the queue before the client searches for it. Most requests need no search."""
ORPHANS_PER_ROUND: Final = 4096
"""Requests that one round searches for, within a few milliseconds. The server is asked only once for each lane."""
ROUND_S: Final = 0.5
"""Seconds between two checks of waiting requests."""
HEADER_BYTES: Final = 512
"""Bytes below `max_payload` that are reserved for the headers of a publication."""


class PrefillDispatcher:
    """The requests of one client that wait for a prefill worker or run on a prefill worker.

    A request that can be served in two phases waits here for a prefill worker with room, for a limited time. All other
    requests, and those whose time has expired, are served by one worker, with the same result.

    Args:
        placement: knows which workers have a prompt in their cache.
        wake: called when `pop_decisions` has something to return.
    """

    def __init__(self, watcher: PresenceWatcher, placement: RequestPlacement, wake: Callable[[], None]) -> None:
        self._watcher = watcher
        self._placement = placement
        self._wake = wake
        # By model with requests that wait for a prefill worker or are at one, or with workers to skip for a while.
        self._queues: dict[str, PrefillQueue[ChildRequest]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stats = placement.stats

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a prefill worker."""
        return sum(map(len, self._queues.values()))

    def num_workers(self, model: str) -> int | None:
        """Return the number of serving prefill workers, or None if no decode worker can use their KV blocks."""
        prefillers = self._watcher.snapshot.prefillers.get(model)
        return None if prefillers is None else len(prefillers)

    def add(self, child: ChildRequest, until: float) -> None:
        """Queue `child` for a prefill worker."""
        asked, model = child.stream.asked, child.open_call.model
        requirements = PrefillRequirements(
            affinity=asked.session_id or asked.group_id or asked.request_id,
            preferred=self._placement.prefer_prefill(child, self._watcher.snapshot.prefillers.get(model, ())),
            prompt_len=asked.prompt_len,
            priority=asked.priority,
            min_weight_version=asked.min_weight_version or 0,
            lora=asked.lora,
        )
        self._queues.setdefault(model, PrefillQueue()).add(child, requirements, until=until)
        self._wake()

    def count_fallback(self, child: ChildRequest, reason: PrefillFallback) -> None:
        """Count that a decode worker serves `child` alone."""
        self._stats.prefill_fallbacks[reason] += 1
        logger.debug("prefill.skipped request=%s reason=%s", child.open_call.request_id, reason)

    def pop_decisions(self) -> list[tuple[ChildRequest, PrefillDecided]]:
        """Return the requests that stop waiting, each with a prefill worker or without one."""
        decided: list[tuple[ChildRequest, PrefillDecided]] = []
        now = time.monotonic()
        self._queues = {model: queue for model, queue in self._queues.items() if not queue.is_idle(now)}
        for model, queue in self._queues.items():
            for child, worker, reason in queue.decide(self._prefill_workers(model), now) if len(queue) else ():
                presence = None if worker is None else self._watcher.table.get(worker)
                connector = None if presence is None else connector_of(presence)
                decided.append((child, PrefillDecided(worker, connector)))
                if worker is not None:
                    self._stats.prefill_legs += 1
                    self._placement.record_prefill(child, worker)
                if reason is not None:
                    self.count_fallback(child, reason)
        self._schedule_wake(now)
        return decided

    def _prefill_workers(self, model: str) -> list[PrefillWorkerInfo]:
        snapshot = self._watcher.snapshot
        found = (self._watcher.table.get(worker) for worker in snapshot.prefillers.get(model, ()))
        return [
            PrefillWorkerInfo(
                worker=presence.worker,
                num_slots=presence.capabilities.max_num_seqs,
                context_len=snapshot.context_lens[model],
                weight_version=presence.weight_version,
                served_version=presence.served_version,
                loras=frozenset(info.name for info in presence.loras),
            )
            for presence in found
            if presence is not None
            and presence.capabilities is not None
            and presence.worker not in self._placement.silent
        ]

    def _schedule_wake(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [at for queue in self._queues.values() if (at := queue.next_decision_at()) is not None]
        if times:
            delay_s = max(min(times) - now, MIN_LOOK_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def release(self, child: ChildRequest, refusal: RequestError | None) -> None:
        """Remove `child`, whose prefill phase or wait is over. This has no effect on other requests.

        Args:
            refusal: reason why the worker did not accept the prefill phase. None if it did.
        """
        queue = self._queues.get(child.open_call.model)
        if queue is None:
            return
        if refusal is None:
            queue.remove(child)
        else:
            queue.reject(child, time.monotonic(), is_full=refusal.code is ErrorCode.QUEUE_FULL)
        if len(queue):
            self._wake()


class _Queued(NamedTuple):
    """A request in the queue."""

    seq: int
    stored_at: float
    looked_for_at: float
    """Time of the last check that the queue may still contain the request, on `time.monotonic()`."""


class RequestDispatcher:
    """Publishes requests, and tracks those that wait for a worker's offer."""

    def __init__(
        self, nats: Connection, config: ClientConfig, watcher: PresenceWatcher, coordinator: AttemptCoordinator
    ) -> None:
        self._nats = nats
        self._subjects, self._client, self._incarnation = config.subjects, config.client, config.incarnation
        self._watcher = watcher
        self._coordinator = coordinator
        self._waits_for_workers = config.wait_for_workers_s > 0
        self._unserved = UnservedModels(config.worker_grace_s)
        self.publisher = QueuePublisher(nats, config.subjects, self._client, self._on_publish_result)
        self.placement = RequestPlacement(watcher.table, coordinator.stats, is_on=config.placement)
        self._prefill_min_tokens = config.prefill_min_tokens
        self.prefill = PrefillDispatcher(watcher, self.placement, self.wake)
        # The requests in flight bound all of these collections.
        self._pending: deque[ChildRequest] = deque()
        self._woken = asyncio.Event()
        # True if the publisher is full: the next publish ack makes room for pending requests.
        self._is_waiting_for_acks = False
        # Requests in the queue, the least recently checked first.
        self._queued: dict[ChildRequest, _Queued] = {}
        self.queue_waits = DurationsByModel()

    def debug_state(self) -> dict[str, int]:
        """Return counts; see `Runtime.debug_state`."""
        counts = {"pending": len(self._pending), "queued": len(self._queued)}
        return counts | self.placement.debug_state() | self.publisher.debug_state()

    def add(self, child: ChildRequest) -> None:
        """Publish the current attempt of `child` as soon as possible."""
        self._set_target(child.open_call)
        self._pending.append(child)
        self._woken.set()

    def _set_target(self, open_call: OpenCall) -> bool:
        """Set the version from which `max_weight_lag` counts. Return False if it is required and not known yet."""
        if open_call.call.request.max_weight_lag is None:
            return True
        if open_call.target_version is None:
            open_call.target_version = self._watcher.table.target_version(open_call.model)
        return open_call.target_version is not None

    def record_admission(self, child: ChildRequest, waited_s: float) -> None:
        """Record that a worker offered to run the request, `waited_s` seconds after its publication."""
        self.queue_waits.add(child.open_call.model, waited_s)
        self._remove_published(child)
        if self.publisher.needs_room:
            self.publisher.add_room(child.open_call.model, child.lane)
        self.placement.record_admission(child)
        self.wake()

    def remove(self, child: ChildRequest, refusal: RequestError | None) -> None:
        """Stop tracking the current attempt. A worker that still offers it receives an abort.

        Args:
            refusal: reason why no worker accepted the attempt. None: it was accepted, or the call has ended.
        """
        self._remove_published(child)
        self.prefill.release(child, refusal)
        self._pending.extend(self.placement.remove(child, refusal))
        self.wake()

    def _remove_published(self, child: ChildRequest) -> None:
        self._queued.pop(child, None)
        if self.publisher.remove(child):
            self._resume_publishing()

    def _resume_publishing(self) -> None:
        """Wake the publisher, because another request may wait for the server's ack."""
        if self._is_waiting_for_acks:
            self._is_waiting_for_acks = False
            self._woken.set()

    def waiting_reason(self, child: ChildRequest) -> str:
        """Return the reason why no worker has admitted the request, phrased to follow a colon, or an empty string."""
        model, request = child.open_call.model, child.open_call.call.request
        serving, others = self._watcher.table.serving(model), self._watcher.snapshot.describe_others(model)
        wanted, lora = request.min_weight_version, request.lora
        if child in self.publisher and (problem := self.publisher.problem(model, child.lane)):
            return problem
        if lora is not None and all(lora not in (info.name for info in worker.loras) for worker in serving):
            return f"the request waits for a worker with the adapter {lora!r}{others}"
        newest = max((w.served_version if lora is None else w.weight_version for w in serving), default=None)
        if wanted is None or (newest is not None and newest >= wanted):
            return "" if serving else f"no worker serves {model}{others}"
        have = "no worker serves" if newest is None else f"the newest version of a serving worker is {newest}"
        return f"the request waits for a worker with weight version {wanted}; {have}{others}"

    def is_blocked(self, child: ChildRequest) -> bool:
        """Return True if workers serve the model of `child` and none of them has the weights or the adapter for it."""
        return bool(self._watcher.table.serving(child.open_call.model) and self.waiting_reason(child))

    def others(self, child: ChildRequest) -> Sequence[WorkerPresence]:
        """Return the workers that serve the model, have the weights and the adapter, and are not silent."""
        serving = self._watcher.table.serving(child.open_call.model)
        return able_others(child, serving, self._coordinator.silent)

    def wake(self) -> None:
        """Check waiting requests again: their condition may have changed."""
        if self._pending or self.prefill.num_waiting or self.placement.has_due:
            self._woken.set()

    def restart_timers(self) -> None:
        """Restart the timers of unserved models after an outage of the connection or of this process."""
        self._unserved.restart_timers()
        self.wake()

    async def run(self) -> None:
        """Publish pending requests until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if self._nats.is_connected:
                # Samples that go to the same prefill worker are adjacent.
                decisions = self.prefill.pop_decisions()
                for (decision, _), group in groupby(decisions, lambda each: (each[1], each[0].open_call)):
                    await self._send(decision, *(child for child, _ in group))
            await self._publish_pending()
            if self._nats.is_connected and not self.publisher.is_full:
                await self._publish_placed(self.placement.pop_followers())

    async def _publish_pending(self) -> None:
        """Try to publish each pending request once. No local name may keep the last call's result alive while idle."""
        for _ in range(len(self._pending)):
            if self.publisher.is_full:
                self._is_waiting_for_acks = True
                return
            if not self._nats.is_connected:
                return
            await self._publish_or_wait(self._pending.popleft())

    async def _publish_or_wait(self, child: ChildRequest) -> None:
        """Publish the current attempt with the requests that go to the same worker, or make it pending again."""
        if child.state not in UNPUBLISHED:
            return
        if child.open_call.call.wait_limit is not None and self._fail_if_unserved(child):
            return
        possible = self._possible(child)
        if not possible.is_target_known or child.awaits_prefill(possible):
            await self._send(possible, child)
        elif child.avoids_queue and (others := self.others(child)):
            # The silent worker pulls from the queue too. A worker that was full is asked again after a round.
            worker = max(others, key=lambda other: other.free_slots)
            was_refused = child.num_refusals and time.monotonic() - child.since < ROUND_S
            if was_refused or worker.free_slots <= 0:
                self._pending.append(child)
            else:
                await self._publish_placed([Placed(worker.worker, [child])])
        else:
            for destination, children in self.placement.place(child):
                is_queue = destination is None
                await self._send(possible if is_queue else replace(possible, direct_to=destination), *children)

    async def _publish_placed(self, placed: Sequence[Placed]) -> None:
        for worker, children in placed:
            await self._send(self._possible(children[0], worker), *children)

    def _possible(self, child: ChildRequest, direct_to: str | None = None) -> on.PublishingPossible:
        open_call = child.open_call
        return on.PublishingPossible(
            max_bytes=self._max_bytes,
            is_served=open_call.model in self._watcher.snapshot.served,
            is_target_known=self._set_target(open_call),
            direct_to=direct_to,
            num_prefill_workers=self.prefill.num_workers(open_call.model),
            prefill_min_tokens=self._prefill_min_tokens,
        )

    @property
    def _max_bytes(self) -> int:
        return self._nats.max_payload - HEADER_BYTES

    async def _send(self, event: Event, *children: ChildRequest) -> None:
        """Let samples of one request handle an event that may require a publication."""
        published: list[tuple[on.Publish, ChildRequest]] = []
        for child in children:
            for instruction in child.handle(event, time.monotonic()):
                match instruction:
                    case on.Publish():
                        published.append((instruction, child))
                    case on.Schedule():
                        # Not immediately: the next change or the next round tries again.
                        self._pending.append(child)
                    case on.JoinPrefillQueue(until):
                        self.prefill.add(child, until)
                    case on.CountFallback(reason):
                        self.prefill.count_fallback(child, reason)
                    case _:
                        self._coordinator.execute(child, (instruction,))
        if len(published) == 1:
            [(publish, child)] = published
            await self._publish((child,), publish.worker, publish.kv)
            return
        # Samples for one worker with the same attempt number go into one message, if the worker supports that.
        for (worker, kv, _, _), group in groupby(published, self._message_of):
            await self._publish([child for _, child in group], worker, kv)

    def _message_of(self, published: tuple[on.Publish, ChildRequest]) -> tuple[str | None, KvTransfer | None, int, int]:
        """Return a key that is equal for requests of one call that go into one message."""
        publish, child = published
        # A message has the lost attempts of one sample.
        alone = 0 if not child.stream.lost and self.placement.reads_siblings(publish.worker) else child.stream.child + 1
        return publish.worker, publish.kv, child.stream.attempt, alone

    async def _publish(self, children: Sequence[ChildRequest], worker: str | None, kv: KvTransfer | None) -> None:
        first, *others = children
        may_wait = worker is not None and kv is None and self.placement.may_wait(first)
        for child in children:
            child.may_wait = may_wait
        attempt, data = first.stream.attempt, self._message(first, others, kv)
        if len(data) > self._max_bytes:
            if not others:
                await self._send(on.Oversized(len(data), self._max_bytes), first)
            for child in children if others else ():
                await self._publish([child], worker, kv)
            return
        # While the request waits, it is kept once: the client rarely publishes it again.
        first.drop_payload()
        self._coordinator.stats.requests += len(children)
        try:
            if worker is None:
                await self.publisher.publish(
                    token=first,
                    model=first.open_call.model,
                    lane=first.lane,
                    data=data,
                    msg_id=f"{self._client}.{self._incarnation}.{first.msg_id}",
                    ttl_s=max(first.deadline - time.monotonic(), 0),
                )
            else:
                self._coordinator.stats.direct += sum(child.state is RequestState.HANDED_OVER for child in children)
                await publish(self._nats, self._subjects.direct(self._client, worker), data)
        except BusBroken as exc:
            logger.warning("request.publish_failed error=%s", exc)
            await self._send(on.PublishFailed(attempt), *children)

    def _message(self, child: ChildRequest, others: Sequence[ChildRequest], kv: KvTransfer | None) -> bytes:
        call = child.open_call.call
        return encode(
            RequestMessage(
                client=self._client,
                incarnation=self._incarnation,
                attempt=child.stream.attempt,
                child=child.stream.child,
                target_version=child.open_call.target_version if child.is_first_attempt else None,
                kv=kv,
                stream=call.streams,
                request=msgspec.Raw(child.payload()),
                siblings=tuple([Sibling(other.stream.child, other.stream.asked.sampling.seed) for other in others]),
                may_wait=child.may_wait,
                given_id=call.request.request_id if call.is_mapped else "",
                # Any decode worker may serve a decode phase.
                placed_for=self.placement.reason(child) if kv is None or kv.is_prefill else "",
                lost=_in_unix_time(child.stream.lost) if child.stream.lost else (),
            )
        )

    def _on_publish_result(self, child: ChildRequest, result: PublishResult) -> None:
        self._resume_publishing()
        attempt = child.stream.attempt
        if result.ok:
            self._coordinator.send(child, on.Stored(attempt))
            self._queued[child] = _Queued(result.seq, now := time.monotonic(), now)
            return
        error = request_error(result.code or ErrorCode.UNKNOWN, result.message, request_id=child.open_call.request_id)
        may_come = self._waits_for_workers or child.open_call.model in self._watcher.snapshot.awaited
        self._coordinator.send(child, on.NotStored(attempt, error, may_come))

    async def check_deadlines(self) -> None:
        """Check for requests that wait too long, until cancelled."""
        while True:
            await asyncio.sleep(ROUND_S)
            self.wake()
            # Also without a connection: workers that were lost before the outage stay lost.
            self.fail_unserved()
            if self._nats.is_connected:
                await self._find_orphans()

    def fail_unserved(self, *, has_grace: bool = True) -> None:
        """Fail the requests that no worker has and that must not wait for one any longer."""
        waiting = self._coordinator.open_children(lambda child: child.worker is None)
        self._unserved.update({child.open_call.model for child in waiting}, self._watcher.snapshot, time.monotonic())
        for child in waiting:
            self._fail_if_unserved(child, has_grace=has_grace)

    def _fail_if_unserved(self, child: ChildRequest, *, has_grace: bool = True) -> bool:
        open_call = child.open_call
        # A request that has begun waits until its deadline.
        limit = None if child.workers or open_call.call.delivered else open_call.call.wait_limit
        why = self._unserved.why_not_wait(open_call.model, limit, time.monotonic(), has_grace=has_grace)
        if why is not None:
            nobody = NoWorkers(message=why, request_id=open_call.request_id)
            self._coordinator.send(child, on.Failed(child.last_error or nobody))
        return why is not None

    async def _find_orphans(self) -> None:
        """Publish requests again that left the queue without an offer."""
        # By model and lane, for this round: requests that wait for long were stored before the first lane is read.
        stored: dict[tuple[str, Lane], StoredRange] = {}
        waited_since = time.monotonic() - ORPHAN_AGE_S
        num_looked_for = 0
        while num_looked_for < ORPHANS_PER_ROUND:
            child = next(iter(self._queued), None)
            if child is None or self._queued[child].looked_for_at > waited_since:
                return
            lane = child.open_call.model, child.lane
            if lane not in stored:
                try:
                    stored[lane] = await stored_in(self._nats, self._subjects, *lane)
                except BusBroken as exc:
                    logger.warning("queue.search_failed error=%s", exc)
                    # The others may have orphans.
                    stored[lane] = StoredRange(has_waiting=True, age_s=math.inf)
                # A worker may have admitted the request during the await.
                continue
            num_looked_for += 1
            queued, now = self._queued.pop(child), time.monotonic()
            self._queued[child] = queued._replace(looked_for_at=now)
            if not stored[lane].may_hold(queued.seq, now - queued.stored_at):
                self._coordinator.stats.orphans += 1
                message = "the request left the queue, and no worker has offered to run it"
                self._coordinator.send(child, on.Lost(child.open_call.failure(ErrorCode.WORKER_LOST, message)))


def _in_unix_time(lost: Sequence[LostAttempt]) -> tuple[LostAttempt, ...]:
    """Return lost attempts with their times on the clock of other machines."""
    ahead_s = time.time() - time.monotonic()
    return tuple(replace(each, at=round(each.at + ahead_s, 6)) for each in lost)
