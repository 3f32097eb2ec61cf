"""Checks results with tokens of several weight versions against fresh engines of each version."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from rollbus.bus.client.generation import Generation
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import undisturbed


async def assert_fresh(
    generation: Generation, request: GenerateRequest, checkpoints: Mapping[int, Path], config: SyntheticConfig
) -> None:
    """Check that each token is the greedy token of a new engine with the checkpoint of the token's version.

    Versions never decrease within a result.

    Args:
        checkpoints: checkpoint folders by version.
    """
    assert generation.error is None, generation.error
    versions = generation.weight_versions.tolist()
    assert versions == sorted(versions)
    tokens = [*request.prompt_token_ids]
    for version, run in groupby(versions):
        count = len(list(run))
        sampling = replace(request.sampling, max_tokens=count)
        asked = replace(request, request_id="r", prompt_token_ids=tokens, sampling=sampling)
        expected = await undisturbed([asked], config, checkpoints[version])
        begin = len(tokens) - len(request.prompt_token_ids)
        np.testing.assert_array_equal(generation.token_ids[begin : begin + count], expected["r"].token_ids)
        tokens += expected["r"].token_ids.tolist()
