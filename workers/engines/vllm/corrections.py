"""Corrects vLLM's own processes: what they report of recomputed KV, and what they compute on a CPU.

The functions are added to vLLM's `EngineCore` in its process, where the worker calls them like vLLM's own methods, or
replace a kernel of the model. Each function names the fault that it corrects.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WATCH = "rollbus_watch_kv"
OUTDATE = "rollbus_outdate_kv"
OWN_FIRST = "rollbus_own_first"
OWN = "/"
"""First character of the names of the worker's own requests."""
RECOMPUTED_AT = -1.0
"""Timestamp of the events that this module adds. vLLM's own events never have it, because no clock returns it."""
FLAT = 2
"""Number of dimensions of a query that the kernel rotates correctly."""
MAX_COUNTED = 1 << 16
"""Maximum number of logprobs of a step that are compared without compiled code, which is slower for more of them."""
MAX_DRAWN = 1 << 18
"""Maximum number of probabilities of a step from which tokens are drawn without compiled code. For more of them,
compiled code uses all threads."""
LEAST_NOISE = 1e-9
"""Smallest exponential draw. One draw of eight million is 0, and a token with the probability 0 must not win by it."""
Kernel = Callable[[Any, Any, Any], tuple[Any, Any]]
Step = Callable[..., Any]


def install() -> None:
    """Correct this process. Call this in the engine core's process before it loads the model, and only once."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, WATCH, watch_kv)
    setattr(EngineCore, OUTDATE, outdate_kv)
    setattr(EngineCore, OWN_FIRST, put_own_first)
    avoid_compiler()


def watch_kv(core: Any) -> None:
    """Start to mark the first output with tokens of each request that was preempted and scheduled again.

    vLLM reports a preemption and the later scheduling to the worker, but not the recomputation of the KV: with
    asynchronous scheduling, an output of an earlier step can arrive after these events.
    """
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

    Otherwise a preempted request finds its own blocks in the prefix cache again, including blocks of weights that were
    replaced since.

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


def put_own_first(core: Any) -> None:
    """Schedule the worker's own requests before all that wait.

    If the running requests hold all KV, others wait for their ends. The canary of an update that keeps the requests
    would wait behind them, for as long as answers take.
    """
    scheduler = core.scheduler
    # As in `watch_kv`: a custom scheduler without these attributes fails here.
    _ = scheduler.requests, scheduler.waiting.remove_request, scheduler.waiting.prepend_request
    add, schedule = scheduler.add_request, scheduler.schedule
    own: list[Any] = []

    def add_request(request: Any) -> None:
        add(request)
        # The adapter numbers the ids of requests.
        if request.request_id.partition("-")[2].startswith(OWN):
            own.append(request)

    def schedule_step(*args: Any, **kwargs: Any) -> Any:
        for request in list(own):
            if request in scheduler.waiting:
                scheduler.waiting.remove_request(request)
                scheduler.waiting.prepend_request(request)
            elif request.request_id not in scheduler.requests:
                own.remove(request)
        return schedule(*args, **kwargs)

    scheduler.add_request, scheduler.schedule = add_request, schedule_step


def _uses(request: Any, lora_number: int | None) -> bool:
    lora = request.lora_request
    return lora_number is None or (lora is not None and lora.lora_int_id == lora_number)


def rotate_all_heads(model_runner: Any) -> None:
    """Rotate all heads of a query by the angles of their token. Call this after the model is loaded.

    vLLM's kernel for CPUs expects `[token, head * number]`. In latent attention, a query is `[token, head, number]`
    (layers/mla.py). The kernel then treats each head as a separate token, and logprobs are wrong by more than 1. The
    Python code of 0.30 to 0.33 is the same there. vLLM uses no kernel if it compiles the model, or if the model's
    config scales positions. So this passes flat queries and keys to the kernel; no effect on a GPU.

    Raises:
        AttributeError: this release of vLLM selects the kernel in another way.
    """
    if model_runner.device.type != "cpu":
        return
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for module in model_runner.get_model().modules():
        if isinstance(module, RotaryEmbedding):
            chosen: Any = module._forward_method
            # The method is bound to the module, unless vLLM compiled it or this function replaced it before.
            if getattr(chosen, "__func__", None) is RotaryEmbedding.forward_cpu:
                module._forward_method = functools.partial(_rotate_flat, chosen)


def _rotate_flat(kernel: Kernel, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
    """Return the rotated query and key in their original shapes; the key may be None."""
    rotated = kernel(positions, _flat(query), None if key is None else _flat(key))
    return rotated[0].view(query.shape), None if key is None else rotated[1].view(key.shape)


def _flat(heads: Any) -> Any:
    return heads.flatten(1) if heads.dim() > FLAT else heads


def keep_seeded_draws(model_runner: Any) -> None:
    """Make seeded tokens on a CPU independent of the split of prompts into steps; no effect on a GPU.

    vLLM samples a token for each request of a step. If the prompt of a request is not completely computed yet, vLLM
    discards this token. It then sets back the offset of a seeded request's generator (v1/worker/gpu_model_runner.py:
    _bookkeeping_sync). A generator on a CPU has no offset, so the engine dies. This function removes the generator
    during that step. vLLM's Model Runner V2 draws by position and has no generators.

    Raises:
        AttributeError: this release of vLLM stores generators in another way.
    """
    if model_runner.device.type != "cpu" or not hasattr(model_runner, "input_batch"):
        return
    sample_tokens = model_runner.sample_tokens
    # Look these up now, so that an unsupported release fails at the start of the engine, not at a request.
    _ = model_runner.discard_request_mask.np, model_runner.input_batch.generators, model_runner.input_batch.num_reqs

    def sample(*args: Any, **kwargs: Any) -> Any:
        batch = model_runner.input_batch
        is_discarded = model_runner.discard_request_mask.np[: batch.num_reqs]
        # Change this dict in place, because the sampler's metadata refers to it.
        generators = batch.generators
        idle = {index: generators.pop(index) for index in list(generators) if is_discarded[index]}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(idle)

    model_runner.sample_tokens = sample


def separate_replicas(model_runner: Any) -> None:
    """Let each replica of an engine draw other tokens for requests without a seed, because vLLM seeds all alike.

    Raises:
        AttributeError: this release of vLLM numbers replicas in another way.
    """
    from vllm.utils.torch_utils import set_random_seed

    if number := model_runner.parallel_config.data_parallel_index:
        set_random_seed(model_runner.model_config.seed + number)
        _generator.cache_clear()


def avoid_compiler() -> None:
    """Rank and draw the tokens of small steps on a CPU with numpy, which is faster than compiled code.

    vLLM compiles two functions: one when an engine starts, which takes two seconds, and ten more without a cache; the
    other one at the first request and again for other numbers of requests, each a second or more. Ranks are the same.
    As in vLLM, the engine argument `seed` determines the draws of requests without a seed.
    """
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    for module, name, own, most in (
        (sampler, "batched_count_greater_than", _count_likelier, MAX_COUNTED),
        (topk_topp_sampler, "compiled_random_sample", _draw, MAX_DRAWN),
    ):
        # 0.33 and later have no function of the second name.
        if (compiled := getattr(module, name, None)) is not None:
            setattr(module, name, functools.partial(_run_one, own, compiled, most))


def _run_one(own: Step, compiled: Step, most: int, logits: Any, *others: Any) -> Any:
    return (own if logits.device.type == "cpu" and logits.numel() <= most else compiled)(logits, *others)


def _count_likelier(logprobs: Any, least: Any) -> Any:
    import torch

    return torch.from_numpy(np.count_nonzero(logprobs.numpy() >= least.numpy(), axis=-1))


def _draw(logits: Any) -> Any:
    import torch

    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    noise = _generator().standard_exponential(probabilities.shape, dtype=np.float32)
    return probabilities.div_(torch.from_numpy(noise.clip(LEAST_NOISE, out=noise))).argmax(dim=-1)


@functools.cache
def _generator() -> np.random.Generator:
    import torch

    # vLLM has seeded torch before the first draw.
    return np.random.default_rng(torch.initial_seed())
