"""The first requests of an engine. They cause vLLM to compile and allocate everything that it prepares at first use."""

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from ....schemas.presence import Capabilities
from ....schemas.request import GenerateRequest
from ....schemas.sampling import SamplingParams

__all__ = ["warm_up_rounds"]

WARM_UP_PROMPT_TOKENS = 32
WARM_UP_TOKENS = 4
GREEDY = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=WARM_UP_TOKENS, top_p=0.9, top_k=5, min_p=0.01, seed=0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=WARM_UP_TOKENS, repetition_penalty=1.1, logit_bias={0: -1.0}, ignore_eos=True)
WARM_UP_ROUNDS = ((GREEDY,), (SEEDED,), (RANDOM,), (RANDOM, RANDOM), (GREEDY, SEEDED, RANDOM))
"""Sampling parameters of the requests that run together in each round. vLLM compiles code at its first use. It compiles
separately for one row and for several rows, and for random sampling without seeds
(v1/sample/ops/topk_topp_sampler.py: compiled_random_sample)."""


def warm_up_rounds(capabilities: Capabilities, *, has_prompt_logprobs: bool) -> Iterator[list[GenerateRequest]]:
    """Yield the requests of each round, which run together.

    Args:
        has_prompt_logprobs: True if this engine returns prompt logprobs.
    """
    room = capabilities.max_model_len - WARM_UP_TOKENS
    prompt = np.arange(min(WARM_UP_PROMPT_TOKENS, room)) % capabilities.vocab_size
    for together in WARM_UP_ROUNDS:
        chosen = together if has_prompt_logprobs else [replace(one, prompt_logprobs=None) for one in together]
        if capabilities.sampling_mask:
            # This engine rejects other requests (v1/engine/input_processor.py: "sampling distribution replay").
            chosen = [replace(one, temperature=one.temperature or 1.0, top_k=one.top_k or 1) for one in chosen]
        # The salt keeps other requests from finding this prompt in the prefix cache.
        yield [GenerateRequest(prompt_token_ids=prompt, sampling=sampling, cache_salt="warm-up") for sampling in chosen]
