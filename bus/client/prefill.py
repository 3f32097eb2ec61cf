"""Which requests go to a prefill worker first, where a fleet has them: the thin part around `bus.protocol.prefill`.

On the bus thread. A request that may be served in two legs waits here for a prefill worker with room, for a bounded
time; all others, and those for which the time is up, are served by one worker, which gives the same.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bus.client.children import Child, Way
from bus.client.fleet_watch import FleetWatch
from bus.protocol.prefill import Alone, PrefillLine, Seat, Wish
from schemas.errors import ErrorCode, RequestError

__all__ = ["Prefill", "PrefillStats"]

logger = logging.getLogger(__name__)

PREFILL_WAIT_S: Final = 2.0
"""How long a request waits for a prefill worker: about what a decode worker needs for a long prompt itself."""
LEG_BYTES: Final = 1024
"""What a decode leg needs in a message beyond what the whole request does, besides its KV parameters."""
MIN_LOOK_S: Final = 0.01
"""Between two looks at what waits, where only time passes."""


@dataclass(slots=True)
class PrefillStats:
    """Counters of what went to prefill workers, and what did not although it might have."""

    prefill_legs: int = 0
    """Attempts that a prefill worker was given, those that it refused included."""
    prefill_fallbacks: dict[str, int] = field(default_factory=lambda: {str(reason): 0 for reason in Alone})
    """By reason: attempts that a decode worker alone was given, in fleets that have decode workers."""


class Prefill:
    """The requests of one client that wait for a prefill worker, or are at one.

    Args:
        min_tokens: of a prompt that goes there at all.
        wake: called when there is something for `decided`.
    """

    def __init__(self, watch: FleetWatch, min_tokens: int, wake: Callable[[], None]) -> None:
        self._watch = watch
        self._min_tokens = min_tokens
        self._wake = wake
        # By model; as many as were ever served by prefill workers.
        self._lines: dict[str, PrefillLine[Child]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.stats = PrefillStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Prefill {self._lines} {self.stats}>"

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a prefill worker."""
        return sum(map(len, self._lines.values()))

    def takes(self, child: Child, max_bytes: int) -> bool:
        """The current attempt of `child` waits here; False: it goes out as it is.

        Args:
            max_bytes: of a message.
        """
        if child.way is not Way.OPEN:
            return False
        if child.has_failed_handover:
            self._go_alone(child, Alone.FAILED)
            return False
        asked = child.stream.asked
        prefillers = self._watch.snapshot.prefillers.get(child.live.model)
        if prefillers is None or asked.prompt_len < self._min_tokens or asked.sampling.max_tokens == 1:
            child.go_alone()
            return False
        reason = self._reason(child, max_bytes) if prefillers else Alone.NO_WORKER
        if reason is not None:
            self._go_alone(child, reason)
            return False
        if child.prefill_until is None:
            child.prefill_until = time.monotonic() + PREFILL_WAIT_S
        wish = Wish(
            affinity=asked.session_id or asked.request_id,
            is_session=asked.session_id is not None,
            prompt_len=asked.prompt_len,
            priority=asked.priority,
            min_weight_version=asked.min_weight_version or 0,
            lora=asked.lora,
        )
        self._lines.setdefault(child.live.model, PrefillLine()).add(child, wish, until=child.prefill_until)
        self._wake()
        return True

    def _reason(self, child: Child, max_bytes: int) -> Alone | None:
        """Why it must not be served in two legs; None: it may."""
        if not child.stream.asked.sampling.is_continuable:
            return Alone.SAMPLING
        return Alone.TOO_LARGE if len(child.payload()) + LEG_BYTES > max_bytes else None

    def _go_alone(self, child: Child, reason: Alone) -> None:
        self.stats.prefill_fallbacks[reason] += 1
        logger.debug("prefill.alone request=%s reason=%s", child.live.request_id, reason)
        child.go_alone()

    def decided(self) -> list[Child]:
        """Those that wait no longer: each goes out, to a prefill worker or without one."""
        decided: list[Child] = []
        now = time.monotonic()
        for model, line in self._lines.items():
            for child, worker, reason in line.decide(self._seats(model), now) if len(line) else ():
                decided.append(child)
                if worker is not None:
                    self.stats.prefill_legs += 1
                    child.go_prefill(worker, self._connector_of(worker))
                elif reason is not None:
                    self._go_alone(child, reason)
        self._look_in_time(now)
        return decided

    def _seats(self, model: str) -> list[Seat]:
        snapshot = self._watch.snapshot
        found = (self._watch.get(worker) for worker in snapshot.prefillers.get(model, ()))
        return [
            Seat(
                worker=presence.worker,
                num_slots=presence.capabilities.max_num_seqs,
                context_len=snapshot.context_lens[model],
                weight_version=presence.weight_version,
                loras=frozenset(info.name for info in presence.loras),
            )
            for presence in found
            if presence is not None and presence.capabilities is not None
        ]

    def _connector_of(self, worker: str) -> str | None:
        presence = self._watch.get(worker)
        return None if presence is None or presence.capabilities is None else presence.capabilities.kv_connector

    def _look_in_time(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [at for line in self._lines.values() if (at := line.next_look()) is not None]
        if times:
            delay_s = max(min(times) - now, MIN_LOOK_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def release(self, child: Child, refusal: RequestError | None) -> None:
        """The leg of `child` is over, or it does not wait any more; without effect on what is not here.

        Args:
            refusal: why its worker did not take the leg.
        """
        line = self._lines.get(child.live.model)
        if line is None:
            return
        if refusal is None:
            line.remove(child)
        else:
            line.refused(child, time.monotonic(), is_full=refusal.code is ErrorCode.QUEUE_FULL)
        if len(line):
            self._wake()
