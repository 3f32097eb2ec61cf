"""KV that the engine core computes anew: told with the tokens that follow, and never taken from older weights' cache.

vLLM tells the worker of a preemption and of the scheduling that follows, not of the recomputation: with asynchronous
scheduling a token that was on its way comes in between. And a preempted
request finds its own blocks in the prefix cache again, also those of weights that were replaced since.

The functions are added to vLLM's `EngineCore` in its process, where the worker calls them as it calls vLLM's own.
"""

import time
from typing import Any

__all__ = ["OUTDATE", "RECOMPUTED_AT", "WATCH", "install"]

WATCH = "rollbus_watch_kv"
OUTDATE = "rollbus_outdate_kv"
RECOMPUTED_AT = -1.0
"""The time of the marks made here, by which they differ from vLLM's own events: no clock shows it."""


def install() -> None:
    """Add the functions to `EngineCore`; called in the engine core's process, harmless when repeated."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, WATCH, watch_kv)
    setattr(EngineCore, OUTDATE, outdate_kv)


def watch_kv(core: Any) -> None:
    """From now on, mark the first output with tokens of each request that was preempted and scheduled again."""
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType

    scheduler = core.scheduler
    # Looked up now: a scheduler of the user's own may lack them.
    _ = scheduler.running, scheduler._preempt_request
    resumed: set[str] = set()
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, results: Any) -> Any:
        # Steps are handled in the order in which they were scheduled: what is on its way of a preempted request comes
        # before the step that resumes it.
        resumed.update(scheduled.scheduled_cached_reqs.resumed_req_ids)
        for new in scheduled.scheduled_new_reqs:
            # Model Runner V2 gets resumed requests as new ones.
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
    """Say that weights or an adapter are replaced; called while the engine core makes no steps.

    Requests that are here and preempted later compute all their KV anew, instead of finding old KV in the prefix cache.
    Those that are in the middle of doing so begin with it again.

    Args:
        lora_number: vLLM's of the adapter that was replaced; None: the weights are.
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
    # From the last to the first: each goes to the head of the queue.
    for request in [request for request in reversed(scheduler.running) if request.request_id in halfway]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        # As if it had not been in the step before; see `Scheduler.reset_prefix_cache`.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _uses(request: Any, lora_number: int | None) -> bool:
    lora = request.lora_request
    return lora_number is None or (lora is not None and lora.lora_int_id == lora_number)
