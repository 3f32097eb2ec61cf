"""Steps of groups on a real vLLM engine: what is stopped and continued is what the model would have given at once."""

import numpy as np
import pytest

import rollbus
from rollbus import GenerateRequest, GroupPrompt
from tests.support.fleet import check_generation
from tests.support.real_fleet import WEIGHT_VERSION, greedy
from tests.support.results import assert_same
from tests.support.streams import all_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LENGTHS = {"long": 1500, "short": 8, "middle": 300, "next": 8, "last": 12}


def request(key: str) -> GenerateRequest:
    """A greedy request of its length, whose first prompt rows are not wanted."""
    return greedy(40, LENGTHS[key], seed=[*LENGTHS].index(key), routed_experts_prompt_start=7)


async def test_carried_groups_equal_undisturbed_ones(nats_url: str, real_fleet: str) -> None:
    """Token for token, with their logprobs, the experts of every row, and the version of every token."""
    prompts = [GroupPrompt(request(key), key=key) for key in LENGTHS]
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        async with rb.groups(prompts, n=2, need=1, over=3) as groups:
            steps = await all_of(groups)
        taken = {str(group.key): group for step in steps for group in step.groups}
        expected = {key: await rb.complete(request(key)) for key in LENGTHS}

    assert taken.keys() == LENGTHS.keys()
    assert [len(step.groups) for step in steps] == [1] * len(LENGTHS)
    # It was stopped and continued, with tokens of several parts.
    assert taken["long"].steps > 1
    assert min(generation.parts for generation in taken["long"].generations) > 1
    for key, group in taken.items():
        assert len(group.generations) == 2
        for generation in group.generations:
            check_generation(generation, request(key))
            assert_same(generation, expected[key])
            assert generation.exact
            assert set(generation.weight_versions.tolist()) == {WEIGHT_VERSION}
            assert generation.kv_version_spans == ((0, WEIGHT_VERSION),)
            np.testing.assert_array_equal(generation.request.prompt_token_ids, request(key).prompt_token_ids)
