"""Submits requests to vLLM's engine cores, reads the output of each of their steps, and measures their load from it.

The output of a step has the routed experts of its tokens. `AsyncLLM.generate`, vLLM's public interface, returns them
only at the end of a request.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from ....schemas.chunk import FinishReason
from ....schemas.errors import EngineDead
from ....schemas.presence import EngineStats
from ....schemas.request import GenerateRequest
from ..rates import PrefixAge, TokenRates, sum_rates
from .calls import engine_errors
from .corrections import RECOMPUTED_AT
from .kv.config import is_decode_phase
from .loads import LoadSerials
from .outputs import LogprobTable, StepOutput
from .params import refusal

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine import EngineCoreEvent, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM


new_tokens, events_of = attrgetter("new_token_ids"), attrgetter("events")


@dataclass(slots=True)
class _Replica:
    """The latest report of one engine core."""

    rates: TokenRates = field(default_factory=TokenRates)
    told_at: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_cache_use: float = 0.0


class LoadMeter:
    """Adds up the reports of the engine cores of all replicas.

    Each core uses its own clock, so each replica has its own rates.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}
        self._has_stats = False
        self.has_moved = False
        """True if the last report has another state of its scheduler than the one before: an engine that hangs reports
        none, or always the same."""
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
            waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            state = stats.num_running_reqs, waiting, stats.kv_cache_usage
            self.has_moved = state != (replica.running, replica.waiting, replica.kv_cache_use)
            replica.running, replica.waiting, replica.kv_cache_use = state
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
        rates = EngineStats(
            prefill_tokens_per_s=sum_rates(one.rates.prefill for one in replicas),
            decode_tokens_per_s=sum_rates(one.rates.decode for one in replicas),
        )
        if not self._has_stats:
            # With the engine argument `disable_log_stats`, the engine cores report no state.
            return rates
        use = sum(one.kv_cache_use for one in replicas) / len(replicas)
        return replace(
            rates,
            kv_cache_use=round(min(max(use, 0.0), 1.0), 6),
            running=sum(one.running for one in replicas),
            waiting=sum(one.waiting for one in replicas),
            preemptions=self._preemptions,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            kv_cache_tokens=self._kv_cache_tokens,
        )


class DrainMarker(asyncio.Event):
    """A marker in the output queue, set by the reader that reaches it: it has read every output before the marker."""


class CoreFeed:
    """Reads the engine core's step outputs.

    The queue of these outputs is part of vLLM and has no limit (v1/engine/core_client.py: AsyncMPClient.outputs_queue).
    The number of requests that the worker accepts and their `max_tokens` limit its content.

    Args:
        loaded: the loaded weights and adapters.
        supported_tasks: tasks that the engine reports for the model.
    """

    def __init__(self, llm: "AsyncLLM", loaded: LoadSerials, supported_tasks: Sequence[str]) -> None:
        self._llm = llm
        self._core = llm.engine_core
        self._loaded = loaded
        self._supported_tasks = supported_tasks
        self.meter = LoadMeter()
        """Counts the load that the engine has reported."""

    async def submit(self, engine_id: str, request: GenerateRequest, params: "VllmSamplingParams") -> None:
        """Submit a request to the engine core.

        Raises:
            InvalidRequest: vLLM rejects the request; it did not reach the engine.
            EngineDead: the engine is dead.
        """
        core_request = self.convert(engine_id, request, params)
        with engine_errors():
            await self._core.add_request_async(core_request)

    def convert(self, engine_id: str, request: GenerateRequest, params: "VllmSamplingParams") -> "EngineCoreRequest":
        """Convert a request to a request of the engine core, which also validates it with vLLM's checks.

        Raises:
            InvalidRequest: vLLM rejects the request, or its adapter is not loaded.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        adapter = self._loaded.adapter_of(request)
        salt = self._loaded.salt_of(request, takes_kv=is_decode_phase(params))
        prompt = tokens_input(np.asarray(request.prompt_token_ids).tolist(), cache_salt=salt)
        has_priorities = self._llm.vllm_config.scheduler_config.policy == "priority"
        trace = {name: value for name in ("traceparent", "tracestate") if (value := getattr(request, name)) is not None}
        options: dict[str, Any] = {
            "lora_request": None if adapter is None else adapter.lora_request,
            "priority": request.priority if has_priorities else 0,
            "trace_headers": trace if request.traceparent is not None else None,
        }
        try:
            return self._llm.input_processor.process_inputs(engine_id, prompt, params, self._supported_tasks, **options)
        except (VLLMClientError, ValueError, TypeError) as exc:
            raise refusal(exc, request.sampling) from exc

    async def abort(self, engine_ids: Sequence[str]) -> None:
        """Abort requests; each that is still open gets an output with finish reason ABORT after its earlier outputs.

        The engine core sends no such output, so this puts it into the queue.
        """
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.engine import FinishReason as VllmFinishReason

        if not engine_ids:
            return
        ends = [EngineCoreOutput(i, [], finish_reason=VllmFinishReason.ABORT) for i in engine_ids]
        self._core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=ends))
        # `next` reports the death of the engine.
        with contextlib.suppress(EngineDead), engine_errors():
            await self._core.abort_requests_async(list(engine_ids))

    async def next(self) -> list[StepOutput]:
        """Return the output that one step of the engine core added to all requests.

        Raises:
            EngineDead: the engine is dead.
        """
        # Do not call `get_output_async`: it only adds a conversion of exceptions, which this method does itself.
        while isinstance(item := await self._core.outputs_queue.get(), DrainMarker):
            item.set()
        if isinstance(item, Exception):
            raise EngineDead(f"the engine core died: {type(item).__name__}: {item}") from item
        self.meter.add(item)
        return [_output(output) for output in item.outputs]

    async def barrier(self) -> None:
        """Return after `next` has returned all outputs that are in the queue now, and was called again.

        Call this only after an answer of the engine core: all of its earlier outputs are then in the queue. It may wait
        forever if the engine dies.
        """
        passed = DrainMarker()
        self._core.outputs_queue.put_nowait(passed)
        await passed.wait()


def _output(output: "EngineCoreOutput") -> StepOutput:
    prompt = output.new_prompt_logprobs_tensors
    prefill = output.prefill_stats
    # vLLM has this since 0.33; it is set only with the finish reason ERROR.
    error = getattr(output, "error", None)
    return StepOutput(
        engine_id=output.request_id,
        token_ids=output.new_token_ids,
        logprobs=None if output.new_logprobs is None else LogprobTable(*output.new_logprobs[:2]),
        prompt_logprobs=None if prompt is None else LogprobTable(prompt[0].numpy(), prompt[1].numpy()),
        routed_experts=output.routed_experts,
        cached_tokens=None if prefill is None else prefill.num_cached_tokens,
        num_external=0 if prefill is None else getattr(prefill, "num_external_cached_tokens", 0),
        was_recomputed=bool(output.events) and _was_recomputed(output.events),
        kv_params=getattr(output, "kv_transfer_params", None),
        finish_reason=None if output.finish_reason is None else FinishReason(str(output.finish_reason)),
        stop_reason=output.stop_reason,
        sampling_mask=getattr(output, "new_sampling_mask", None),
        **({} if error is None else {"error": f"the engine failed this request: {error.message}"}),
    )


def _was_recomputed(events: "Sequence[EngineCoreEvent]") -> bool:
    """Return True if `corrections` marked the request's KV as recomputed; vLLM's own events come too early."""
    return any(event.timestamp == RECOMPUTED_AT for event in events)
