"""A vLLM worker process behind the bus returns what the model computes, for single and for parallel requests."""

import numpy as np
import pytest

import rollbus
from rollbus import GenerateRequest, SamplingParams
from tests.support.real_fleet import greedy, prompt
from tests.support.requests import assert_same

pytestmark = pytest.mark.vllm


@pytest.mark.proves("P14")
async def test_rows_come_with_their_tokens(nats_url: str, real_fleet: str) -> None:
    """Each streamed chunk has the rows of its engine steps: first those of the prompt, then one for each token."""
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        chunks = [chunk async for chunk in rb.generate(greedy(40, 12))]

    # The last token has no row yet. A slow worker sends the tokens of several steps together.
    num_rows, num_tokens = 0, 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        if chunk.num_tokens:
            assert chunk.routed_experts.start == num_rows
            num_rows += chunk.routed_experts.shape[0]
            assert num_rows == 40 + num_tokens - 1
    assert num_tokens == 12
    assert len(chunks) > 1


@pytest.mark.proves("P36")
async def test_samples_of_a_prompt_equal_requests_with_consecutive_seeds(nats_url: str, real_fleet: str) -> None:
    """n=3 returns three samples with routed experts, and child request i equals a request with seed + i."""
    sampling = SamplingParams(max_tokens=20, seed=3, n=3, ignore_eos=True)
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        first = await rb.complete(GenerateRequest(prompt_token_ids=prompt(30), sampling=sampling))
        alone = await rb.complete(
            GenerateRequest(
                prompt_token_ids=prompt(30), sampling=SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
            )
        )

    assert len(first.siblings) == 2
    assert_same(first.siblings[1], alone)
    assert not np.array_equal(first.token_ids, alone.token_ids)
