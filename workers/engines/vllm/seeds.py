"""Seeded requests on a CPU: a draw whose token vLLM throws away does not advance the request's random numbers.

vLLM samples for each request of a step, also for those whose prompt is not computed to its end yet, and throws that
token away. Then it sets the generator of a seeded request back by its offset (v1/worker/gpu_model_runner.py:
_bookkeeping_sync), and a generator on a CPU has none: the engine dies. Here the generator is kept out of that step.
vLLM's Model Runner V2 draws by position and has no generators.
"""

from typing import Any

__all__ = ["keep_seeded_draws"]


def keep_seeded_draws(model_runner: Any) -> None:
    """Make seeded tokens on a CPU independent of how prompts are split over steps; nothing changes on a GPU.

    Raises:
        AttributeError: this release of vLLM keeps generators in another way.
    """
    if model_runner.device.type != "cpu" or not hasattr(model_runner, "input_batch"):
        return
    sample_tokens = model_runner.sample_tokens
    # Looked up now, so that another release fails when the engine starts and not at a request.
    _ = model_runner.discard_request_mask.np, model_runner.input_batch.generators, model_runner.input_batch.num_reqs

    def sample(*args: Any, **kwargs: Any) -> Any:
        batch = model_runner.input_batch
        is_discarded = model_runner.discard_request_mask.np[: batch.num_reqs]
        # The dict itself: the sampler's metadata refers to it.
        generators = batch.generators
        idle = {index: generators.pop(index) for index in list(generators) if is_discarded[index]}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(idle)

    model_runner.sample_tokens = sample
