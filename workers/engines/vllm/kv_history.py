"""Marks recomputed KV in the engine core's outputs, and prevents the reuse of cached KV of older weights.

vLLM reports a preemption and the later scheduling to the worker, but not the recomputation of the KV: with asynchronous
scheduling, an output of an earlier step can arrive after these events. Also, a preempted request finds its own blocks
in the prefix cache again, including blocks of weights that were replaced since.

The functions are added to vLLM's `EngineCore` in its process. The worker calls them like vLLM's own methods.
"""

import time
from typing import Any

__all__ = ["OUTDATE", "RECOMPUTED_AT", "WATCH", "install"]

WATCH = "rollbus_watch_kv"
OUTDATE = "rollbus_outdate_kv"
RECOMPUTED_AT = -1.0
"""Timestamp of the events that this module adds. vLLM's own events never have it, because no clock returns it."""


def install() -> None:
    """Add the functions to `EngineCore`. Call this in the engine core's process; a repeated call has no effect."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, WATCH, watch_kv)
    setattr(EngineCore, OUTDATE, outdate_kv)


def watch_kv(core: Any) -> None:
    """Start to mark the first output with tokens of each request that was preempted and scheduled again."""
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType

    scheduler = core.scheduler
    # Read these attributes now, so that a custom scheduler without them fails here.
    _ = scheduler.running, scheduler._preempt_request
    resumed: set[str] = set()
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, results: Any) -> Any:
        # Steps are processed in the order in which they were scheduled: outputs of a preempted request from earlier
        # steps arrive before the step that resumes the request.
        resumed.update(scheduled.scheduled_cached_reqs.resumed_req_ids)
        for new in scheduled.scheduled_new_reqs:
            # With Model Runner V2, resumed requests are in the list of new requests.
            request = scheduler.requests.get(new.req_id)
            if request is not None and request.num_preemptions:
                resumed.add(new.req_id)
        made = update(scheduled, results)
        if resumed:
            for output in (output for outputs in made.values() for output in outputs.outputs):
                if output.request_id in resumed and output.new_token_ids:
                    resumed.discard(output.request_id)
                    event = EngineCoreEvent(EngineCoreEventType.SCHEDULED, RECOMPUTED_AT)
                    output.events = [*(output.events or ()), event]
            resumed.intersection_update(scheduler.requests)
        return made

    scheduler.update_from_output = update_from_output


def outdate_kv(core: Any, lora_number: int | None = None) -> None:
    """Mark the KV of requests as outdated because weights or an adapter were replaced.

    Call this while the engine core runs no steps. An open request that is preempted later recomputes all its KV,
    instead of using old KV from the prefix cache. A request in the middle of a recomputation starts it again.

    Args:
        lora_number: vLLM's number of the replaced adapter; None: the weights were replaced.
    """
    scheduler = core.scheduler
    meant = [request for request in scheduler.requests.values() if _uses(request, lora_number)]
    for request in meant:
        request.skip_reading_prefix_cache = True
    halfway = {
        request.request_id
        for request in meant
        if request.num_output_tokens and request.num_computed_tokens < request.num_tokens - 1
    }
    # Go from the last to the first, because each preempted request goes to the head of the queue.
    for request in [request for request in reversed(scheduler.running) if request.request_id in halfway]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        # Treat the request as if it was not in the previous step; see `Scheduler.reset_prefix_cache`.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _uses(request: Any, lora_number: int | None) -> bool:
    lora = request.lora_request
    return lora_number is None or (lora is not None and lora.lora_int_id == lora_number)
