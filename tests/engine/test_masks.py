"""Sampling masks of vLLM's step outputs. Engines on a CPU make no masks, so the tests build outputs as of a GPU."""

from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import SamplingMaskLists

from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.result_arrays import TokenMasks
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.presence import Capabilities
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.control.canary import own_request
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.vllm.engine import warm_up_rounds
from rollbus.workers.engines.vllm.feed import _output
from rollbus.workers.engines.vllm.outputs import OpenRequests

VOCAB_SIZE = 100
MASKING = SyntheticConfig(sampling_mask=True).capabilities


def opened(**fields: Any) -> tuple[OpenRequests, str]:
    """Return the open requests of an engine that makes masks, with one request, and its engine id."""
    requests = OpenRequests(None, vocab_size=VOCAB_SIZE)
    request = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(logprobs=None, top_k=5), **fields)
    return requests, requests.add("key", request)


def read(requests: OpenRequests, engine_id: str, tokens: list[int], mask: SamplingMaskLists | None) -> RequestStep:
    """Return the step of one output."""
    output = EngineCoreOutput(engine_id, tokens, new_sampling_mask=mask)
    [step], _ = requests.read([_output(output)])
    assert isinstance(step, RequestStep)
    return step


def lists(step: RequestStep) -> list[list[int]]:
    """Return the mask's token ids of each token."""
    assert step.sampling_mask is not None, step.error
    return [ids.tolist() for ids in TokenMasks.joined([step.sampling_mask]).split()]


def test_a_mask_of_one_token_may_have_ids_without_offsets() -> None:
    """The scheduler may cut a mask of one token out of a batch: such a mask has ids without offsets."""
    requests, engine_id = opened()
    batch = SamplingMaskLists(np.array([7, 3, 8, 9], np.int32), np.array([0, 1, 4]))

    assert lists(read(requests, engine_id, [7], batch.slice_request(0, 1))) == [[7]]
    assert lists(read(requests, engine_id, [8], batch.slice_request(1, 1))) == [[3, 8, 9]]


def test_the_offsets_of_a_mask_need_not_begin_at_0() -> None:
    """A mask of several tokens has offsets, which need not begin at 0."""
    requests, engine_id = opened()
    mask = SamplingMaskLists(np.array([1, 7, 3, 8], np.int32), np.array([1, 2, 4]))

    assert lists(read(requests, engine_id, [7, 8], mask)) == [[7], [3, 8]]


def test_a_step_without_tokens_has_no_mask() -> None:
    """A step without tokens needs no mask, because it may be the last one."""
    requests, engine_id = opened()
    output = EngineCoreOutput(engine_id, [])
    output.finish_reason = None
    [step], _ = requests.read([_output(output)])

    assert isinstance(step, RequestStep)
    assert (step.sampling_mask, step.error) == (None, None)


def test_a_request_that_declined_masks_gets_no_masks() -> None:
    """A request that declined masks gets none, and its tokens come in batches as from engines without masks."""
    requests, engine_id = opened(return_sampling_mask=False)
    mask = SamplingMaskLists(np.array([7], np.int32))
    first = read(requests, engine_id, [7], mask)
    [batch], _ = requests.read([_output(EngineCoreOutput(engine_id, [7], new_sampling_mask=mask))])

    assert first.sampling_mask is None
    assert not isinstance(batch, RequestStep)


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (None, "no mask for 1 tokens"),
        (SamplingMaskLists(np.array([7, 7]), np.array([0, 1, 2])), "mask of 2 tokens with 2 ids, for 1 tokens"),
        (SamplingMaskLists(np.array([7]), np.array([0, 5])), "mask of 1 tokens with 1 ids"),
        (SamplingMaskLists(np.array([7, VOCAB_SIZE])), "ids from 7 to 100; allowed: 0 to below 100"),
        (SamplingMaskLists(np.array([-1, 7])), "ids from -1 to 7"),
        (SamplingMaskLists(np.array([], np.int32)), "tokens with 0 to 0 ids"),
        (SamplingMaskLists(np.array([6, 8])), "token 7 is not among the 2 ids of its mask"),
    ],
)
def test_an_invalid_mask_ends_its_request(mask: SamplingMaskLists | None, why: str) -> None:
    """An invalid mask ends its request, so that no trainer receives it."""
    requests, engine_id = opened()
    step = read(requests, engine_id, [7], mask)

    assert step.finish_reason is FinishReason.ERROR
    assert step.error is not None
    assert why in step.error


@pytest.mark.parametrize("capabilities", [MASKING])
def test_an_engine_with_masks_accepts_the_workers_own_requests(capabilities: Capabilities) -> None:
    """The worker's own requests have a temperature above 0 and a `top_k`.

    vLLM with masks rejects other requests. With a `top_k` of 1, the requests are as good as greedy.
    """
    own = [own_request(capabilities)]
    warming = [one for together in warm_up_rounds(capabilities, has_prompt_logprobs=True) for one in together]
    for request in own + warming:
        assert request.sampling.temperature > 0
        assert request.sampling.top_k > 0
    assert own[0].sampling.top_k == 1
