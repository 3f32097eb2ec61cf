"""Corrects seeded requests on a CPU: a draw whose token vLLM discards must not advance the request's generator.

vLLM samples a token for each request of a step. If the prompt of a request is not completely computed yet, vLLM
discards this token. It then sets back the offset of a seeded request's generator (v1/worker/gpu_model_runner.py:
_bookkeeping_sync). A generator on a CPU has no offset, so the engine dies. This module removes the generator during
that step. vLLM's Model Runner V2 draws by position and has no generators.
"""

from typing import Any

__all__ = ["keep_seeded_draws"]


def keep_seeded_draws(model_runner: Any) -> None:
    """Make seeded tokens on a CPU independent of the split of prompts into steps; no effect on a GPU.

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
