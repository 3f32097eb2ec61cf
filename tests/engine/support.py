"""Helpers of several tests of the engine."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from rollbus.schemas.request import GenerateRequest
from tests.support.requests import TOLERANCE, expert_sets
from tests.support.vllm_engine import Result, RunningEngine, no_routing_here


def prompt(length: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Return random token ids without special tokens."""
    return np.random.default_rng(seed).integers(3, 512, length)


def rows_here(num_rows: int) -> int:
    """Return the number of rows of these tokens, or 0 if the installed vLLM returns no rows."""
    return num_rows if no_routing_here() is None else 0


def same_as_alone(engine: RunningEngine, requests: Sequence[GenerateRequest], results: Sequence[Result]) -> None:
    """Run each request alone, without the prefix cache of the others, and assert the same results."""
    for request, result in zip(requests, results, strict=True):
        alone = engine.generate(replace(request, cache_salt="alone"))[0]
        assert result.token_ids == alone.token_ids
        assert np.abs(result.logprobs - alone.logprobs).max() < TOLERANCE
        assert np.array_equal(expert_sets(result.rows), expert_sets(alone.rows))
