"""Chooses the requests that go to a prefill worker first. Runs `PrefillQueue` in asyncio, on the bus thread.

A request that can be served in two phases waits here for a prefill worker with room, for a limited time. All other
requests, and those whose time has expired, are served by one worker, with the same result.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ...schemas.errors import ErrorCode, RequestError
from ..protocol.attempt.events import PrefillDecided
from ..protocol.fleet.fleet_snapshot import connector_of
from ..protocol.queue.prefill_queue import PrefillFallback, PrefillQueue, PrefillRequirements, PrefillWorkerInfo
from .children import ChildRequest
from .placement import RequestPlacement
from .presence_watcher import PresenceWatcher

__all__ = ["PrefillDispatcher", "PrefillStats"]

logger = logging.getLogger(__name__)

MIN_LOOK_S: Final = 0.01
"""Minimum seconds between two timed checks of waiting requests."""


@dataclass(slots=True)
class PrefillStats:
    """Counters of prefill phases and of attempts without one, as in `ClientStats`."""

    prefill_legs: int = 0
    prefill_fallbacks: dict[str, int] = field(default_factory=lambda: {str(reason): 0 for reason in PrefillFallback})


class PrefillDispatcher:
    """The requests of one client that wait for a prefill worker or run on a prefill worker.

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
        self.stats = PrefillStats()

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<PrefillDispatcher {self._queues} {self.stats}>"

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
        self.stats.prefill_fallbacks[reason] += 1
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
                    self.stats.prefill_legs += 1
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
