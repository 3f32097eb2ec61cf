"""Measures the load of vLLM from the steps of its engine cores; see `schemas.presence.EngineStats`."""

from operator import attrgetter
from typing import TYPE_CHECKING

from ....schemas.presence import EngineStats
from ..prefix_age import PrefixAge
from ..token_rates import TokenRates

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

__all__ = ["LoadMeter"]

new_tokens, events_of = attrgetter("new_token_ids"), attrgetter("events")


class _Replica:
    """The latest report of one engine core."""

    def __init__(self) -> None:
        self.rates = TokenRates()
        self.told_at = 0.0
        self.running = self.waiting = 0
        self.kv_cache_use = 0.0


class LoadMeter:
    """Adds up the reports of the engine cores of all replicas.

    Each core uses its own clock, so each replica has its own rates.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}
        self._has_stats = False
        self._preemptions = self._queries = self._hits = 0
        self.prefix_age: PrefixAge | None = None
        """Counts the computed tokens; None: it is unknown which prefixes were evicted."""
        self._kv_cache_tokens: int | None = None

    def add(self, outputs: "EngineCoreOutputs") -> None:
        """Count one step of one engine core."""
        replica = self._replicas.setdefault(outputs.engine_index, _Replica())
        made = outputs.outputs
        if made:
            # `map` avoids a Python loop, because a step may have a thousand requests.
            num_made = num_tokens = sum(map(len, map(new_tokens, made)))
            for output in filter(events_of, made):
                num_tokens -= self._add_events(output, replica.rates, outputs.timestamp)
            if num_made:
                replica.rates.end_step(outputs.timestamp, num_tokens)
                if self.prefix_age is not None:
                    self.prefix_age.add(num_made, outputs.timestamp)
        replica.told_at = outputs.timestamp
        stats = outputs.scheduler_stats
        if stats is not None:
            self._has_stats = True
            replica.running = stats.num_running_reqs
            replica.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            replica.kv_cache_use = stats.kv_cache_usage
            self._queries += stats.prefix_cache_stats.queries
            self._hits += stats.prefix_cache_stats.hits

    def _add_events(self, output: "EngineCoreOutput", rates: TokenRates, at: float) -> int:
        """Count the events of a request before this output. Return the number of its tokens if they are its first."""
        from vllm.v1.engine import EngineCoreEventType

        events = output.events or ()
        self._preemptions += sum(event.type == EngineCoreEventType.PREEMPTED for event in events)
        prefill = output.prefill_stats
        if prefill is None:
            return 0
        scheduled_at = [event.timestamp for event in events if event.type == EngineCoreEventType.SCHEDULED]
        if scheduled_at:
            rates.add_prefill(prefill.num_computed_tokens, scheduled_at[0])
        if self.prefix_age is not None:
            self.prefix_age.add(prefill.num_computed_tokens, at, num_begun=1)
        return len(output.new_token_ids)

    def restart(self, prefix_age: PrefixAge | None = None, kv_cache_tokens: int | None = None) -> None:
        """Reset counts and rates, because compilation distorted them until now. Keep the current state.

        Args:
            prefix_age: counts the tokens that are computed from now on; None: they are not counted.
            kv_cache_tokens: number of tokens that fit into the KV caches; None: not known.
        """
        self.prefix_age = prefix_age
        self._kv_cache_tokens = kv_cache_tokens
        self._preemptions = self._queries = self._hits = 0
        for replica in self._replicas.values():
            replica.rates = TokenRates()

    def interrupt(self) -> None:
        """Exclude the time until the next steps: the engine was paused."""
        for replica in self._replicas.values():
            replica.rates.interrupt(replica.told_at)

    def stats(self) -> EngineStats:
        """Return the current load.

        With several replicas, return the sum. The KV cache use is the mean, because all replicas have caches of one
        size.
        """
        replicas = self._replicas.values()
        prefill = [rate for one in replicas if (rate := one.rates.prefill) is not None]
        decode = [rate for one in replicas if (rate := one.rates.decode) is not None]
        rates = EngineStats(
            prefill_tokens_per_s=round(sum(prefill), 3) if prefill else None,
            decode_tokens_per_s=round(sum(decode), 3) if decode else None,
        )
        if not self._has_stats:
            # With the engine argument `disable_log_stats`, the engine cores report no state.
            return rates
        use = sum(one.kv_cache_use for one in replicas) / len(replicas)
        return EngineStats(
            kv_cache_use=round(min(max(use, 0.0), 1.0), 6),
            running=sum(one.running for one in replicas),
            waiting=sum(one.waiting for one in replicas),
            preemptions=self._preemptions,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_tokens_per_s=rates.decode_tokens_per_s,
            kv_cache_tokens=self._kv_cache_tokens,
        )
