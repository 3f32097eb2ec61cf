"""Group steps on a real vLLM engine: interrupted and resumed requests equal uninterrupted ones."""

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
    """Return a greedy request with the length of this key, without the first prompt rows."""
    return greedy(40, LENGTHS[key], seed=[*LENGTHS].index(key), routed_experts_prompt_start=7)


async def test_carried_groups_equal_uninterrupted_requests(nats_url: str, real_fleet: str) -> None:
    """Carried groups have the same tokens, logprobs, routed experts and versions as uninterrupted requests."""
    prompts = [GroupPrompt(request(key), key=key) for key in LENGTHS]
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        async with rb.groups(prompts, n=2, need=1, over=3) as groups:
            steps = await all_of(groups)
        taken = {str(group.key): group for step in steps for group in step.groups}
        expected = {key: await rb.complete(request(key)) for key in LENGTHS}

    assert taken.keys() == LENGTHS.keys()
    assert [len(step.groups) for step in steps] == [1] * len(LENGTHS)
    # This group was interrupted and resumed, with tokens from several requests.
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
